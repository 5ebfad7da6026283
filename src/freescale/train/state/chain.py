"""Chains of checkpoints: a full one, and deltas that each hold what changed since the one before.

    full  <-  delta  <-  delta

A delta names its parent by step and checksum, and that checksum covers the parent's files and its
own parent: a chain is one run's, link by link, or it is refused. All ranks verify together.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from freescale.train.state.files import (
    CheckpointFolder,
    Damaged,
    compute_checksum,
    parse_step,
    read_state,
    sum_state,
)
from freescale.transport.api import Transport, gather_json
from freescale.transport.failures import run_on_all_ranks


@dataclass(frozen=True)
class Intact:
    """A checkpoint whose files, and those of all that it depends on, are as they were written."""

    path: Path
    state: dict[str, Any]
    ancestors: tuple[Intact, ...] = ()  # of a delta: the full one, and the deltas up to its parent

    @property
    def base(self) -> Intact:
        """The full checkpoint that its tables begin with: itself, if it is one."""
        return self.ancestors[0] if self.ancestors else self

    @property
    def deltas(self) -> tuple[Intact, ...]:
        """What follows the base, in the order in which it is applied."""
        return (*self.ancestors, self)[1:]

    @property
    def checksum(self) -> int:
        return sum_state(self.state)


def verify_checkpoint(
    path: Path, transport: Transport, known: dict[Path, Intact | Damaged] | None = None
) -> Intact:
    """Compares all files with what was written, each on one rank. A collective.

    Args:
        path: of the checkpoint; the ones that it depends on lie beside it.
        transport: the ranks that compare.
        known: what was found of others so far, each alone; it is added to.

    Raises:
        Damaged: on all ranks; names the file that differs, or the parent that is missing or
            another one than the delta was made from.
    """
    known = {} if known is None else known
    links = [_verify_alone(path, transport, known)]
    while (parent := links[-1].state.get("parent")) is not None:
        refuse = partial(_refuse_wrong_parent, links[-1], parent)
        run_on_all_ranks(transport, refuse, Damaged)
        try:
            link = _verify_alone(_find_parent(links[-1], parent), transport, known)
        except Damaged as error:
            raise Damaged(f"{path} depends on a checkpoint that is damaged: {error}") from None
        links.append(link)
    target, *others = links
    return Intact(path, target.state, tuple(reversed(others)))


def _find_parent(child: Intact, parent: Mapping[str, Any]) -> Path:
    return CheckpointFolder(child.path.parent).path(int(parent["step"]))


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
            f"{child.path} holds what changed since {path.name}, which is not beside it: use an "
            "earlier checkpoint, or put it back"
        ) from None
    if found != parent["checksum"]:
        raise Damaged.advise(
            f"{child.path} holds what changed since another {path.name} than the one beside it"
        )


def _verify_alone(path: Path, transport: Transport, known: dict[Path, Intact | Damaged]) -> Intact:
    """A checkpoint's own files."""
    found = known.get(path)
    if found is None:
        try:
            found = _compare_all(path, transport)
        except Damaged as error:
            found = error
        known[path] = found
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


def last_intact(folder: Path, transport: Transport) -> Intact | None:
    """The last checkpoint; if it, or one that it depends on, is damaged, with a warning, the one
    before, and so on. A collective; the same on all ranks."""
    files = CheckpointFolder(folder)
    steps: list[int] = gather_json(transport, files.steps())[0]  # rank 0's counts
    known: dict[Path, Intact | Damaged] = {}
    for step in reversed(steps):
        try:
            return verify_checkpoint(files.path(step), transport, known)
        except Damaged as error:
            if step == steps[0]:
                raise
            if transport.rank == 0:
                warnings.warn(f"{error}. Taking the one before", stacklevel=2)
    return None


def find_needed(parents: Mapping[int, int | None], steps: Iterable[int]) -> set[int]:
    """These steps and all that they depend on. `parents`: of each step that there is, or None."""
    needed: set[int] = set()
    for step in steps:
        link: int | None = step
        while link is not None and link in parents and link not in needed:
            needed.add(link)
            link = parents[link]
    return needed


def find_expired(
    parents: Mapping[int, int | None], saved: int, keep: int, protected: Collection[int] = ()
) -> list[int]:
    """The steps that may go once a checkpoint is saved: all but the last `keep` (`saved`, the one
    just saved, is the last), the protected, and what these depend on. `parents`: of each step that
    there is, the one whose changes it holds, or None."""
    others = sorted(step for step in parents if step != saved)
    last = others[max(0, len(others) - keep + 1) :]
    needed = find_needed(parents, [saved, *last, *protected])
    return sorted(set(parents) - needed)
