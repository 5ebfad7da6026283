"""Writes the contents of a checkpoint, by all ranks together: under a temporary name, then renamed.

It needs the transport's control messages and nothing else of training, so it can run meanwhile, on
another thread and over a group of its own.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from freescale.train.state.contents import DiskContents, Span
from freescale.train.state.disk import CheckpointFolder, compute_checksum, write_state
from freescale.train.state.finite_check import NotFinite, find_not_finite
from freescale.transport.api import Transport, gather_json
from freescale.transport.failures import describe_error, run_on_all_ranks, run_on_rank_0

T = TypeVar("T")

_AHEAD = 10_000_000  # bytes that torch's writer fetches from a device before it writes them
# Seconds between two tensors. Writing one takes about 0.3 ms of the interpreter, and there are
# hundreds: in one go they would hold up a step for as long, spread out they fall into its pauses.
_PAUSE = 0.003


def write_checkpoint(
    files: CheckpointFolder,
    contents: DiskContents,
    transport: Transport,
    writer: TensorWriter,
) -> int:
    """Writes a checkpoint and puts it in its place. A collective that uses nothing of the ranks'
    devices. Returns the checksum of its state.json, 0 on other ranks than 0.

    Raises:
        ValueError: it could not be written, on all ranks; nothing of it is left.
        NotFinite: a weight or optimizer state is not finite.
    """
    step = int(contents.state["progress"]["step"])
    run_on_all_ranks(transport, lambda: _refuse_diverged(step, contents), NotFinite)
    failure, checksum = f"checkpoint {files.path(step)} could not be written", 0
    folder, state = files.writing_path(step), contents.state

    def finish() -> None:
        nonlocal checksum
        checksum = write_state(folder, state)
        files.finish(step)

    try:
        run_on_rank_0(transport, lambda: files.begin(step), failure)
        writer.write(folder, contents.tensors, transport, failure)
        _add_checksums(state, folder, contents.spans, transport)
        run_on_rank_0(transport, finish, failure)
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


def _add_checksums(
    state: dict[str, Any], folder: Path, spans: Mapping[str, Span] | None, transport: Transport
) -> None:
    """Adds those of all files, and the spans of changed rows of all ranks."""
    rank = transport.rank

    def sum_files() -> dict[str, list[int]]:
        mine = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
        return {path.name: compute_checksum(path) for path in mine}

    gathered = gather_json(transport, [run_on_all_ranks(transport, sum_files), spans])
    state["files"] = {name: of for files, _ in gathered for name, of in files.items()}
    if spans is not None:
        state["changed"] = [spans for _, spans in gathered]


class TensorWriter:
    """Writes named tensors in the format of torch's `save`, which itself asks each tensor for its
    state_dict, logs two lines, gathers the plans each time, and finally sends what it has written
    about all tensors to all ranks: with hundreds of them, that holds up a training step by tens of
    milliseconds.

    `paced`: during training, with little use of the interpreter, which the step needs. The tensors
    are copies on the host, there is a pause before each, and what consecutive checkpoints have in
    common is planned once.
    """

    def __init__(self, paced: bool = False) -> None:
        self._paced = paced
        self._tensors: list[tuple[Any, ...]] | None = None  # of the plan that all ranks have
        self._plan = SavePlan([])  # what this rank writes
        self._metadata = Metadata({})  # on rank 0

    def write(
        self, folder: Path, tensors: Mapping[str, Any], transport: Transport, failure: str
    ) -> None:
        """Writes tensors, or if not paced nested dicts of them. A collective."""
        ahead = 0 if self._paced else _AHEAD  # paced, tensors are there, one at a time
        writer = FileSystemWriter(folder, per_thread_copy_ahead=ahead, overwrite=True)
        planner = _PacedPlanner() if self._paced else DefaultSavePlanner()
        described = _describe(tensors) if self._paced else None
        known = self._paced and described == self._tensors

        def write() -> bytes:
            writer.set_up_storage_writer(transport.rank == 0)
            writing = writer.write_data(writer.prepare_local_plan(self._plan), planner)
            writing.wait()
            return pickle.dumps(writing.value())

        def finish() -> None:
            _explain(lambda: writer.finish(self._metadata, [pickle.loads(e) for e in written]))

        try:
            if all(transport.gather_bytes(b"1" * known)):
                planner.state_dict = dict(tensors)
            else:
                self._tensors = None
                self._make_plan(tensors, planner, writer, transport)
                self._tensors = described
            written = _gather(transport, write)
            run_on_rank_0(transport, finish)
        except ValueError as error:
            raise ValueError(f"{failure}: {error}") from error

    def _make_plan(
        self,
        tensors: Mapping[str, Any],
        planner: DefaultSavePlanner,
        writer: FileSystemWriter,
        transport: Transport,
    ) -> None:
        """Divides the tensors among the ranks, as torch does. A collective."""
        rank = transport.rank

        def plan_own() -> bytes:
            planner.set_up_planner(dict(tensors), writer.storage_meta(), is_coordinator=rank == 0)
            return pickle.dumps(planner.create_local_plan())

        def plan_all() -> bytes:
            if rank != 0:
                return b""
            plans, self._metadata = planner.create_global_plan([pickle.loads(e) for e in own])
            return pickle.dumps(writer.prepare_global_plan(plans))

        own = _gather(transport, plan_own)
        self._plan = pickle.loads(_gather(transport, plan_all)[0])[rank]


def _gather(transport: Transport, work: Callable[[], bytes]) -> list[bytes]:
    """What `work` returns on each rank. A collective."""
    return transport.gather_bytes(run_on_all_ranks(transport, lambda: _explain(work)))


def _explain(work: Callable[[], T]) -> T:
    """torch raises many kinds of errors: a ValueError with the system's message instead."""
    try:
        return work()
    except Exception as error:
        raise ValueError(describe_error(error)) from error


class _PacedPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        time.sleep(_PAUSE)
        return super().resolve_data(write_item)


def _describe(tensors: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """All that a plan depends on: names, shapes and types, and a rank's part of sharded tensors."""
    return [
        (name, value.shape, value.dtype, value._local_tensor.shape, value.placements)
        if isinstance(value, DTensor)
        else (name, value.shape, value.dtype)
        for name, value in tensors.items()
    ]
