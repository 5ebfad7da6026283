"""Checkpoints on a disk that holds one and a half of them. As a program: `python -m
helpers.full_disk FOLDER`, in tests/, where FOLDER is on such a disk."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

from freescale.train.state.checkpoints import Checkpoints
from freescale.transport.local import LocalTransport
from helpers import ranks
from helpers.checkpoints import batches, build


def _fill(transport, folder):
    parallel, dense, pipeline = build(transport, items=5000)
    checkpoints = Checkpoints(Path(folder), transport)
    for result in pipeline.run(batches(transport, 0, 3)):
        checkpoints.save(parallel, dense, {"step": result.step})


def full_disk(folder):
    """On a disk that holds one checkpoint and a half."""
    ranks.CONTEXT = multiprocessing.get_context("fork")  # all that is needed is imported
    folder = Path(folder)
    said = [
        error.strip().splitlines()[-1]
        for error, _ in ranks.gather_ranks(2, _fill, str(folder), timeout=60)
    ]
    failed = f"ValueError: checkpoint {folder}/step-00000002 could not be written"
    assert said == [f"{failed}: the disk is full: make room, or keep fewer checkpoints"] * 2, said
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["step-00000001"], left
    parallel, dense, _ = build(LocalTransport(), items=5000)
    checkpoints = Checkpoints(folder, LocalTransport())
    assert checkpoints.load(folder / "step-00000001", parallel, dense)["step"] == 1


if __name__ == "__main__":
    full_disk(sys.argv[1])
