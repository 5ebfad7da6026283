"""Writes the contents of a checkpoint, by all ranks together: under a temporary name, then renamed.

It needs the transport's control messages and nothing else of training, so it can run meanwhile, on
another thread and over a group of its own.
"""

from __future__ import annotations

import io
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from freescale.train.state.contents import DiskContents
from freescale.train.state.disk import CheckpointFolder, compute_checksum, write_state
from freescale.train.state.finite_check import NotFinite, find_not_finite
from freescale.transport.api import Transport, gather_json
from freescale.transport.failures import describe_error, run_on_all_ranks, run_on_rank_0
from freescale.transport.process_group import ProcessGroupTransport

T = TypeVar("T")

_AHEAD = 10_000_000  # bytes that torch's writer fetches from a device before it writes them
# Seconds between two tensors. Writing one takes about 0.3 ms of the interpreter, and there are
# hundreds: in one go they would hold up a step for as long, spread out they fall into its pauses.
_PAUSE = 0.003


def write_checkpoint(
    files: CheckpointFolder,
    contents: DiskContents,
    transport: Transport,
    planner: PacedPlanner | None = None,
) -> int:
    """Writes a checkpoint and puts it in its place. A collective that uses nothing of the ranks'
    devices. With a `planner` instead of torch's own, the tensors are copies on the host. Returns
    the checksum of its state.json, 0 on other ranks than 0.

    Raises:
        ValueError: it could not be written, on all ranks; nothing of it is left.
        NotFinite: a weight or optimizer state is not finite.
    """
    step = int(contents.state["progress"]["step"])
    run_on_all_ranks(transport, lambda: _refuse_diverged(step, contents), NotFinite)
    failure, checksum = f"checkpoint {files.path(step)} could not be written", 0
    try:
        run_on_rank_0(transport, lambda: files.begin(step), failure)
        folder = files.writing_path(step)
        checksum = _write(folder, contents, transport, failure, planner)
        run_on_rank_0(transport, lambda: files.finish(step), failure)
    except ValueError:  # on all ranks: none is still writing
        if transport.rank == 0:
            with suppress(OSError):  # the next save tries again
                files.clear()
        raise
    return checksum


def _refuse_diverged(step: int, contents: DiskContents) -> None:
    background = contents.copies is not None
    if name := find_not_finite(contents.tensors, contents.untrained, background=background):
        raise NotFinite(
            f"{name} is not finite at step {step}, which is therefore not saved: "
            "the checkpoints before it stay"
        )


def _write(
    folder: Path,
    contents: DiskContents,
    transport: Transport,
    failure: str,
    planner: PacedPlanner | None,
) -> int:
    write_tensors(folder, contents.tensors, transport, failure, planner)
    rank, checksum = transport.rank, 0

    def sum_files() -> dict[str, list[int]]:
        mine = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
        return {path.name: compute_checksum(path) for path in mine}

    written = [run_on_all_ranks(transport, sum_files), contents.spans]
    gathered = gather_json(transport, written)
    state = contents.state
    state["files"] = {name: of for files, _ in gathered for name, of in files.items()}
    if contents.spans is not None:
        state["changed"] = [spans for _, spans in gathered]

    def finish() -> None:
        nonlocal checksum
        checksum = write_state(folder, state)

    run_on_rank_0(transport, finish, failure)
    return checksum


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Any],
    transport: Transport,
    failure: str,
    planner: PacedPlanner | None = None,
) -> None:
    """Writes named tensors, or nested dicts of them, which a paced planner does not accept. A
    collective."""
    # A paced planner hands out copies on the host, one at a time.
    ahead = 0 if planner is not None else _AHEAD
    writer = CheckpointWriter(folder, per_thread_copy_ahead=ahead, overwrite=True)
    if planner is not None:
        known = b"1" * planner.is_planned(tensors)
        if all(transport.gather_bytes(known)):
            _write_as_planned(writer, tensors, transport, failure, planner)
            return
    with explain_errors(failure):
        save(dict(tensors), storage_writer=writer, planner=planner, **coordinate(transport))


def _write_as_planned(
    writer: CheckpointWriter,
    tensors: Mapping[str, Any],
    transport: Transport,
    failure: str,
    planner: PacedPlanner,
) -> None:
    """As torch's `save` does once it has a plan. `save` itself asks each tensor for its state_dict,
    logs two lines, gathers the plans, and finally sends what it has written about all tensors to
    all ranks: with hundreds of them, that holds up a step by tens of milliseconds."""
    plan, metadata = planner.reuse_plan(tensors)

    def write() -> bytes:
        writer.set_up_storage_writer(transport.rank == 0)
        writing = writer.write_data(writer.prepare_local_plan(plan), planner)
        writing.wait()
        return pickle.dumps(writing.value())

    try:
        written = transport.gather_bytes(run_on_all_ranks(transport, write))
        results = [pickle.loads(each) for each in written] if transport.rank == 0 else []
        run_on_rank_0(transport, lambda: writer.finish(metadata, results))
    except ValueError as error:
        raise ValueError(f"{failure}: {error}") from error


# ---- how torch's save and load are called


def coordinate(transport: Transport) -> dict[str, Any]:
    """Arguments by which torch's save and load coordinate the ranks."""
    if isinstance(transport, ProcessGroupTransport):
        return {"process_group": transport.control}
    return {"no_dist": True}


@contextmanager
def explain_errors(failure: str) -> Iterator[None]:
    """Around torch's save and load: a failure on any rank is one line on all. Suppresses torch's
    warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise ValueError(f"{failure}: {describe_error(first)}") from error


class CheckpointWriter(FileSystemWriter):
    """torch's writer, with the system's error in its exceptions: other ranks receive the message of
    an exception, not its causes."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        return self._explain(super().write_data, *args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self._explain(super().finish, *args, **kwargs)

    def _explain(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            raise ValueError(describe_error(error)) from error


# ---- writing during training, with little use of the interpreter, which the step needs

_Described = list[tuple[Any, ...]]


@dataclass
class Series:
    """Consecutive checkpoints of the same ranks. What they have in common is planned once."""

    plans: int = 0  # that all ranks have begun to make together
    number: int = 0  # of the plan below, if it was finished
    tensors: _Described | None = None  # of this plan
    plan: SavePlan | None = None  # what this rank writes
    metadata: Metadata | None = None  # on rank 0


class PacedPlanner(DefaultSavePlanner):
    """Hands the tensors of one checkpoint to torch's writer, with pauses."""

    def __init__(self, series: Series) -> None:
        super().__init__()
        self.series = series
        self._tensors: _Described = []

    def is_planned(self, tensors: Mapping[str, Any]) -> bool:
        """Whether the series has a plan for these, on this rank."""
        series = self.series
        return series.number == series.plans > 0 and _describe(tensors) == series.tensors

    def reuse_plan(self, tensors: Mapping[str, Any]) -> tuple[SavePlan, Metadata | None]:
        """The plan of the series, for these tensors."""
        assert self.series.plan is not None
        self.state_dict = dict(tensors)
        return self.series.plan, self.series.metadata

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.series.plans += 1
        self._tensors = _describe(state_dict)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        self.series.metadata = metadata
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan, series = super().finish_plan(new_plan), self.series
        series.plan, series.tensors, series.number = plan, self._tensors, series.plans
        return plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        time.sleep(_PAUSE)
        return super().resolve_data(write_item)


def _describe(tensors: Mapping[str, Any]) -> _Described:
    """All that a plan depends on: names, shapes and types, and a rank's part of sharded tensors."""
    return [
        (name, value.shape, value.dtype, value._local_tensor.shape, value.placements)
        if isinstance(value, DTensor)
        else (name, value.shape, value.dtype)
        for name, value in tensors.items()
    ]
