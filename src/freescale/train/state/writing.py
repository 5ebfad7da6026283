"""Writes the contents of a checkpoint, by all ranks together: under a temporary name, then renamed.

It needs the transport's control messages and nothing else of training, so it can run meanwhile, on
another thread and over a group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from freescale.train.state.contents import DiskContents, Span
from freescale.train.state.disk import CheckpointFolder, compute_checksum, write_state
from freescale.train.state.finite_check import NotFinite, find_not_finite
from freescale.train.torch_files.tensor_writer import TensorWriter
from freescale.transport.api import Transport, gather_json
from freescale.transport.failures import run_on_all_ranks, run_on_rank_0


def write_checkpoint(
    files: CheckpointFolder,
    contents: DiskContents,
    transport: Transport,
    writer: TensorWriter,
) -> int:
    """Writes a checkpoint and puts it in its place. A collective that uses nothing of the ranks'
    devices. Returns the checksum of its state.json, 0 on other ranks than 0. ValueError, on all
    ranks, if it could not be written, and nothing of it is left; NotFinite for a weight or
    optimizer state that is not finite."""
    step = int(contents.state["progress"]["step"])
    run_on_all_ranks(transport, lambda: _refuse_diverged(step, contents), NotFinite)
    failure, checksum = f"checkpoint {files.path(step)} could not be written", 0
    state, names = contents.state, [""]

    def begin() -> None:
        names[0] = files.begin(step)

    def finish() -> None:
        nonlocal checksum
        checksum = write_state(folder, state)
        files.finish(step)

    try:
        run_on_rank_0(transport, begin, failure)
        folder = files.folder / gather_json(transport, names)[0][0]
        writer.write(folder, contents.tensors, transport, failure)
        _add_checksums(state, folder, contents.spans, transport)
        run_on_rank_0(transport, finish, failure)
    except ValueError:  # on all ranks: none is still writing
        if transport.rank == 0:
            with suppress(OSError, ValueError):  # the next save tries again
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
