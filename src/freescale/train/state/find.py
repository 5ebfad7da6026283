"""Finds a checkpoint by the name that a user gives it: `last`, `best`, or its step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freescale.train.state.chain import Intact, last_intact, verify_checkpoint
from freescale.train.state.files import CheckpointFolder, parse_step
from freescale.transport.api import Transport, gather_json


def find_checkpoint(folder: Path, name: str | None, transport: Transport) -> Intact:
    """Finds an intact checkpoint. A collective; the same on all ranks.

    Args:
        folder: of the checkpoints.
        name: `last`; `best`, which the last one names; a step, as 1000 or step-00001000. None is
            `best` where the run keeps it, else `last`.
        transport: the ranks that will load it.

    Raises:
        ValueError: there is no such checkpoint, or it is damaged.
    """
    wanted = None if name in (None, "last", "best") else _parse_name(str(name))
    last = last_intact(folder, transport) if wanted is None else None
    if wanted is None and last is None:
        raise ValueError(f"{folder} holds no checkpoint: name the folder of a run")
    if last is not None:
        best = find_best_step(last.state["progress"])
        if name == "last" or (name is None and best is None):
            return last
        if best is None:
            raise ValueError(
                f"{folder} has no best checkpoint: the run was not trained with --keep best, or "
                "has not been evaluated yet; name `last` or a step"
            )
        wanted = best
    assert wanted is not None
    files = CheckpointFolder(folder)
    steps: list[int] = gather_json(transport, files.steps())[0]  # rank 0's counts
    if wanted not in steps:
        raise ValueError(
            f"{folder} has no checkpoint of step {wanted}; it has "
            f"{', '.join(map(str, steps)) or 'none'}"
        )
    return verify_checkpoint(files.path(wanted), transport)


def find_best_step(progress: Mapping[str, Any]) -> int | None:
    """The step of the best checkpoint, if the run keeps it."""
    best = progress.get("best") or {}
    return best.get("step") if best.get("kept") else None


def _parse_name(name: str) -> int:
    step = int(name) if name.isdecimal() else parse_step(Path(name))
    if step is None:
        raise ValueError(f"{name!r} names no checkpoint: say last, best or a step, as 1000")
    return step
