"""Writes the contents of a checkpoint, by all ranks together: under a temporary name, then renamed.

It needs the transport's control messages and nothing else of training. So it can run at the same
time, on another thread and over a group of its own (`Background`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.checkpoint.state_dict_saver import save

from freescale.embedding.lease import Capture
from freescale.embedding.tables import Tables
from freescale.train.state.contents import Contents
from freescale.train.state.errors import CheckpointWriter, explain_errors
from freescale.train.state.files import CheckpointFolder, compute_checksum, write_state
from freescale.train.state.finite_check import NotFinite, find_not_finite
from freescale.train.state.paced_planner import PacedPlanner, Series
from freescale.train.state.state_copies import StateCopies
from freescale.transport.api import Transport, gather_json
from freescale.transport.failures import describe_error, run_on_all_ranks, run_on_rank_0
from freescale.transport.process_group import ProcessGroupTransport
from freescale.transport.threads import start_thread

_AHEAD = 10_000_000  # bytes that torch's writer brings from a device before it writes them


def write_checkpoint(
    files: CheckpointFolder,
    contents: Contents,
    transport: Transport,
    planner: PacedPlanner | None = None,
) -> int:
    """Writes a checkpoint and puts it in its place. A collective; of the ranks' devices nothing is
    used. With a `planner`, in the place of torch's own, the tensors are copies on the host. Returns
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
    except ValueError:  # all ranks are here, none writes any more
        if transport.rank == 0:
            with suppress(OSError):  # the next save tries again
                files.clear()
        raise
    return checksum


def begin_copies(tables: Tables, collect: Callable[[], Contents]) -> Callable[[], Contents]:
    """Begins to copy what a checkpoint holds. Returns a function that waits for the copies and
    returns them, or raises what went wrong."""
    try:
        contents = collect()
    except (OSError, ValueError) as error:
        return partial(_raise, error)
    capture, copies = Capture(contents.add_sharded), contents.copies
    assert copies is not None
    tables.lease.capture(capture)

    def await_copies() -> Contents:
        await_rows(capture, copies)
        return contents

    return await_copies


def _raise(error: Exception) -> NoReturn:
    raise error


def await_rows(capture: Capture, copies: StateCopies) -> None:
    """Waits for the copies of the rows, and of all else. ValueError if they could not be made."""
    try:
        capture.wait()
        copies.finish()
    except Exception as error:
        raise ValueError(
            f"rows could not be copied into host memory: {describe_error(error)}"
        ) from error


def _refuse_diverged(step: int, contents: Contents) -> None:
    background = contents.copies is not None
    if name := find_not_finite(contents.tensors, contents.untrained, background=background):
        raise NotFinite(
            f"{name} is not finite at step {step}, which is therefore not saved: "
            "the checkpoints before it stay"
        )


def _write(
    folder: Path,
    contents: Contents,
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
    """Named tensors, or dicts of them within each other, which a paced planner does not take. A
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
    """As torch's `save` from its plan on. That asks each tensor for its state_dict, with two lines
    of a log, brings the plans together, and at the end sends what it has written about all tensors
    to all ranks: with hundreds of them, that holds up a step by tens of milliseconds."""
    plan, metadata = planner.take_plan(tensors)

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


def coordinate(transport: Transport) -> dict[str, Any]:
    """How torch's save and load bring the ranks together."""
    if isinstance(transport, ProcessGroupTransport):
        return {"process_group": transport.control}
    return {"no_dist": True}


class Background:
    """Work during training: one job at a time, on a thread of its own."""

    def __init__(self, transport: Transport) -> None:
        """A collective: opens a group for the thread's control messages."""
        self.transport = transport
        if isinstance(transport, ProcessGroupTransport):
            self.transport = transport.open_control()
        self._done: Callable[[], None] | None = None
        self._series = Series()

    def make_planner(self) -> PacedPlanner:
        return PacedPlanner(self._series)

    def start(self, work: Callable[[], None]) -> None:
        """Starts `work`; the job before must have been waited for."""
        assert self._done is None, "one job at a time"
        error: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as caught:  # noqa: BLE001 - raised where it is waited for
                error.append(caught)

        # A process that ends leaves it a moment; what is half written then is not a checkpoint.
        thread = start_thread("checkpoint", run, lambda: None)

        def finish() -> None:
            thread.join()
            if error:
                raise error[0]

        self._done = finish

    def wait(self) -> None:
        """Waits for the job, if there is one, and raises its error."""
        done, self._done = self._done, None
        if done is not None:
            done()
