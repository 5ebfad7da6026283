"""Writes named tensors by all ranks together, in the files of torch.distributed.checkpoint.

It needs the transport's control messages and nothing else of training, so it can run meanwhile, on
another thread and over a group of its own.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from freescale.stores.path import StorePath
from freescale.transport.api import Transport
from freescale.transport.failures import describe_error, run_on_all_ranks, run_on_rank_0

T = TypeVar("T")

_AHEAD = 10_000_000  # bytes that torch's writer fetches from a device before it writes them
# Seconds between two tensors. Writing one takes about 0.3 ms of the interpreter, and there are
# hundreds: in one go they would hold up a step for as long, spread out they fall into its pauses.
_PAUSE = 0.003


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
        on_disk = not isinstance(folder, StorePath)
        writer = _Writer(folder, sync_files=on_disk, per_thread_copy_ahead=ahead, overwrite=True)
        planner = _PacedPlanner() if self._paced else DefaultSavePlanner()
        described = _describe(tensors) if self._paced else None
        known = self._paced and described == self._tensors

        def write() -> bytes:
            writer.set_up_storage_writer(transport.rank == 0)
            writing = writer.write_data(writer.prepare_local_plan(self._plan), planner)
            writing.wait()
            return pickle.dumps(writing.value())

        def finish() -> None:
            results = [pickle.loads(each) for each in written]
            _explain(lambda: writer.finish(self._metadata, results))

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
            local = [pickle.loads(each) for each in own]
            plans, self._metadata = planner.create_global_plan(local)
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


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.path))  # torch's has the class of the path


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
