"""Checkpoints that are verified: their files, and those of all that they depend on.

A delta names its parent by step and checksum, and that checksum covers the parent's files and its
own parent: a chain belongs to one run, link by link, or it is refused. All ranks verify together.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from freescale.embedding.tables import Tables
from freescale.train.state.contents import is_followed
from freescale.train.state.disk import (
    CheckpointFolder,
    Damaged,
    compute_checksum,
    parse_step,
    read_state,
    sum_state,
)
from freescale.train.state.stored import open_folder
from freescale.transport.api import Transport, gather_json
from freescale.transport.failures import run_on_all_ranks

Known = dict[Path, "Intact | Damaged"]


@dataclass(frozen=True)
class Intact:
    """A checkpoint that is as it was written, with everything that it depends on."""

    path: Path
    state: dict[str, Any]
    ancestors: tuple[Intact, ...] = ()  # of a delta: the full one, and the deltas up to its parent

    @property
    def base(self) -> Intact:
        """The full checkpoint that its tables begin with; a full one itself."""
        return self.ancestors[0] if self.ancestors else self

    @property
    def deltas(self) -> tuple[Intact, ...]:
        """What follows the base, in the order in which it is applied."""
        return (*self.ancestors, self)[1:]

    @property
    def checksum(self) -> int:
        return sum_state(self.state)


@dataclass
class Parent:
    """A checkpoint since which changes of rows are marked."""

    step: int
    checksum: int | None  # of its state.json, once that is written; rank 0's
    deltas: int  # since the last full one, itself included
    tables: Tables

    def fits(self, tables: Tables, consumer: str, step: int) -> bool:
        """Whether the marks are those of the checkpoint of `step`, as far as every rank knows."""
        return self.tables is tables and self.step < step and is_followed(tables, consumer)

    def is_in_place(self, files: CheckpointFolder) -> bool:
        """Whether it is as it was saved, and still the last one of the run. Rank 0's."""
        return files.steps()[-1:] == [self.step] and files.sum_state(self.step) == self.checksum


def verify_checkpoint(path: Path, transport: Transport, known: Known | None = None) -> Intact:
    """Compares all files with what was written, each on one rank. A collective.

    Args:
        path: of the checkpoint; those that it depends on lie next to it.
        transport: the ranks that compare.
        known: what was found of others so far, each by itself; it is added to.

    Raises:
        Damaged: on all ranks; names the file that differs, or the parent that is missing or not
            the one that the delta was made from.
    """
    known = {} if known is None else known
    links = [_verify_alone(path, transport, known)]
    while (parent := links[-1].state.get("parent")) is not None:
        child = links[-1]
        run_on_all_ranks(transport, partial(_refuse_wrong_parent, child, parent), Damaged)
        try:
            links.append(_verify_alone(_find_parent(child, parent), transport, known))
        except Damaged as error:
            raise Damaged(f"{path} depends on a checkpoint that is damaged: {error}") from None
    target, *others = links
    return Intact(path, target.state, tuple(reversed(others)))


def _find_parent(child: Intact, parent: Mapping[str, Any]) -> Path:
    return open_folder(child.path.parent).path(int(parent["step"]))


def _refuse_wrong_parent(child: Intact, parent: Mapping[str, Any]) -> None:
    path, step = _find_parent(child, parent), int(child.state["progress"]["step"])
    named = parse_step(child.path)
    if named is not None and named != step:
        raise Damaged.advise(f"{child.path} holds a checkpoint of step {step}")
    if int(parent["step"]) >= step:
        raise Damaged.advise(f"{child.path} names step {parent['step']} as the one before it")
    try:
        found = sum_state(read_state(path))
    except Damaged:
        raise
    except ValueError:
        raise Damaged(
            f"{child.path} holds what changed since {path.name}, which is not next to it: use an "
            "earlier checkpoint, or put it back"
        ) from None
    if found != parent["checksum"]:
        raise Damaged.advise(
            f"{child.path} holds what changed since another {path.name} than the one next to it"
        )


def _verify_alone(path: Path, transport: Transport, known: Known) -> Intact:
    """Verifies a checkpoint's own files."""
    if path not in known:
        try:
            known[path] = _compare_all(path, transport)
        except Damaged as error:
            known[path] = error
    found = known[path]
    if isinstance(found, Damaged):
        raise found
    return found


def _compare_all(path: Path, transport: Transport) -> Intact:
    def compare() -> dict[str, Any]:
        state = read_state(path)
        written: dict[str, list[int]] = state.get("files", {})
        by_size = sorted(written, key=lambda name: (-written[name][0], name))
        for name in by_size[transport.rank :: transport.world]:
            _compare(path / name, written[name])
        return state

    state = run_on_all_ranks(transport, compare, Damaged)
    seen = transport.gather_bytes(str(sum_state(state)).encode())
    if len(set(seen)) > 1:
        raise ValueError(
            f"the ranks see different files in {path}: use a folder that all of them share"
        )
    return Intact(path, state)


def _compare(path: Path, written: list[int]) -> None:
    try:
        found = compute_checksum(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EIO):
            raise
        raise Damaged.advise(f"{path} cannot be read ({error.strerror})") from None
    if found[0] != written[0]:
        raise Damaged.advise(f"{path} is damaged ({found[0]:,} bytes, {written[0]:,} were written)")
    if found != written:
        raise Damaged.advise(f"{path} is damaged (its checksum is not that of what was written)")


# ---- which one


def list_steps(files: CheckpointFolder, transport: Transport) -> list[int]:
    """What rank 0 sees. A collective."""
    steps: list[int] = gather_json(transport, files.steps())[0]
    return steps


def last_intact(folder: Path, transport: Transport) -> Intact | None:
    """The newest checkpoint that is intact, with a warning about each newer one. A collective; the
    same on all ranks. Damaged if there are checkpoints and none is intact."""
    files = open_folder(folder)
    steps = list_steps(files, transport)
    known: Known = {}
    for step in reversed(steps):
        try:
            return verify_checkpoint(files.path(step), transport, known)
        except Damaged as error:
            if step == steps[0]:
                raise
            if transport.rank == 0:
                warnings.warn(f"{error}. Taking the one before", stacklevel=2)
    return None


def find_checkpoint(folder: Path, name: str | None, transport: Transport) -> Intact:
    """Finds an intact checkpoint. A collective; the same on all ranks.

    Args:
        folder: of the checkpoints.
        name: `last`; `best`, which the last one names; a step, as 1000 or step-00001000. None:
            `best` if the run keeps it, else `last`.
        transport: the ranks that will load it.

    Raises:
        ValueError: there is no such checkpoint, or it is damaged.
    """
    last = None
    if name in (None, "last", "best"):
        last = last_intact(folder, transport)
        if last is None:
            raise ValueError(f"{folder} holds no checkpoint: name the folder of a run")
    wanted = choose_step(folder, name, last.state["progress"] if last is not None else {})
    if wanted is None:
        assert last is not None
        return last
    files = open_folder(folder)
    steps = list_steps(files, transport)
    if wanted not in steps:
        raise ValueError(
            f"{folder} has no checkpoint of step {wanted}; it has "
            f"{', '.join(map(str, steps)) or 'none'}"
        )
    return verify_checkpoint(files.path(wanted), transport)


def choose_step(folder: Path, name: str | None, progress: Mapping[str, Any]) -> int | None:
    """The step that a name of `find_checkpoint` means; None: that of the last checkpoint, whose
    progress this is."""
    if name not in (None, "last", "best"):
        return _parse_name(str(name))
    best = find_best_step(progress)
    if name == "last" or (name is None and best is None):
        return None
    if best is None:
        raise ValueError(
            f"{folder} has no best checkpoint: the run was not trained with --keep best, or "
            "has not been evaluated yet; name `last` or a step"
        )
    return best


def find_best_step(progress: Mapping[str, Any]) -> int | None:
    """The step of the best checkpoint, if the run keeps it."""
    best = progress.get("best") or {}
    return best.get("step") if best.get("kept") else None


def _parse_name(name: str) -> int:
    step = int(name) if name.isdecimal() else parse_step(Path(name))
    if step is None:
        raise ValueError(f"{name!r} names no checkpoint: say last, best or a step, as 1000")
    return step
