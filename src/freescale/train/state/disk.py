"""States on disk: the folder of a run's checkpoints, how a new one is put in place, and its
state.json.

    .writing-00000100         being written; becomes step-00000100 by a rename
    step-00000100.replaced    valid until a new checkpoint of the same step is in place
    .removing-00000100        being removed
    given-up-00000100         the run continued from an earlier one; the next save removes it

A process may be killed between any two operations: what is listed is whole, and the next save
clears the rest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freescale.stores.path import StorePath

FORMAT = 2  # 1 has no checksums, and only the tensors of an optimizer's state
DELTA_FORMAT = 3  # only those table rows that changed since the parent
_CHUNK = 1 << 22
_STATE = "state.json"
_GIVEN_UP = "given-up-"


class Damaged(ValueError):
    """A state is not as it was written."""

    @staticmethod
    def advise(what: str) -> Damaged:
        """With what the user can do."""
        return Damaged(f"{what}: use an earlier checkpoint")


@dataclass
class CheckpointFolder:
    """Reading is for any process; only rank 0 changes anything."""

    folder: Path

    def claim(self) -> None:
        """Makes this the only writer: on a disk, the run's folder is locked."""

    def close(self) -> None:
        """Lets others write."""

    def steps(self) -> list[int]:
        paths = self.folder.iterdir() if self.folder.is_dir() else []
        steps = {
            step
            for path in paths
            if (step := parse_step(path)) is not None and (path / _STATE).exists()
        }
        return sorted(steps)

    def parents(self) -> dict[int, int | None]:
        """The parent of each step; None of a full one, and of one whose state.json cannot be
        read."""
        parents = {step: self.read(step).get("parent") for step in self.steps()}
        return {step: None if of is None else int(of["step"]) for step, of in parents.items()}

    def sum_state(self, step: int) -> int:
        """The checksum of a checkpoint's state.json; that of nothing if it cannot be read."""
        return sum_state(self.read(step))

    def read(self, step: int) -> dict[str, Any]:
        """A checkpoint's state.json; nothing if it cannot be read."""
        try:
            return read_state(self.path(step))
        except (ValueError, OSError):
            return {}

    def path(self, step: int) -> Path:
        final, replaced = self._final(step), self._replaced(step)
        return replaced if replaced.exists() and not final.exists() else final

    def _final(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _replaced(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.replaced"

    def name_later(self, step: int) -> str:
        return ", ".join(self.path(found).name for found in self.steps() if found > step)

    def refuse_ahead(self, step: int) -> None:
        """ValueError if there are checkpoints ahead of `step`: they belong to another run."""
        if ahead := self.name_later(step):
            raise ValueError(
                f"{self.folder} holds checkpoints ahead of step {step} ({ahead}), "
                "which this run did not come from: "
                "go on from one of them (load it; --resume), remove them, or use another folder"
            )

    # ---- rank 0

    def writing_path(self, step: int) -> Path:
        return self.folder / f".writing-{step:08d}"

    def begin(self, step: int) -> str:
        """Makes an empty folder to write in (its name), and clears what killed processes left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clear()
        for replaced in self.folder.glob("step-*.replaced"):
            known = parse_step(replaced)
            if known is None:
                continue
            if self._final(known).exists():
                self._discard(replaced)
            else:  # killed before the new one was in place
                replaced.rename(self._final(known))
        self.writing_path(step).mkdir()
        return self.writing_path(step).name

    def finish(self, step: int) -> None:
        """Puts a written checkpoint in place, also of one of the same step."""
        temporary = self.writing_path(step)
        final, replaced = self._final(step), self._replaced(step)
        sync(temporary)
        if os.path.lexists(final):
            final.rename(replaced)
        temporary.rename(final)
        sync(self.folder)
        if os.path.lexists(replaced):
            self._discard(replaced)

    def give_up_after(self, step: int) -> None:
        """Renames the checkpoints after `step`, the last ones first, as in `remove`. From then on
        nothing finds them."""
        later = [found for found in self.steps() if found > step]
        for found in reversed(later):
            given_up = self.folder / f"{_GIVEN_UP}{found:08d}"
            for path in (self._replaced(found), self._final(found)):  # the latter counts
                if os.path.lexists(path):
                    if os.path.lexists(given_up):
                        _remove(given_up)
                    path.rename(given_up)
        if later:
            sync(self.folder)

    def remove_given_up(self) -> None:
        for path in self.folder.glob(f"{_GIVEN_UP}*"):
            if path.name.removeprefix(_GIVEN_UP).isdecimal():
                _remove(path)

    def remove(self, steps: Iterable[int]) -> None:
        """Removes the last ones first: a kill in between leaves no delta without its parent."""
        for step in sorted(steps, reverse=True):
            self._discard(self._final(step))

    def clear(self) -> None:
        for kind in (".writing-*", ".removing-*"):
            for leftover in self.folder.glob(kind):
                _remove(leftover)

    def _discard(self, path: Path) -> None:
        """Removes a checkpoint under another name: half removed, it must not count."""
        going = path.with_name(f".removing-{path.name.removeprefix('step-')}")
        path.rename(going)
        _remove(going)


def _remove(path: Path) -> None:
    """Removes a folder. If it is a link, for instance to another disk, the target stays."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def parse_step(path: Path) -> int | None:
    """The step of a checkpoint's folder; None for copies next to it, and anything else."""
    suffix = r"\.w[0-9]+" if isinstance(path, StorePath) else r"\.replaced"
    match = re.fullmatch(rf"step-([0-9]{{8,}})({suffix})?", path.name)
    step = int(match[1]) if match else -1
    return step if match and match[1] == f"{step:08d}" else None


def sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- which ones stay. A full checkpoint stands alone, a delta depends on those before it:
#      full  <-  delta  <-  delta


def find_needed(parents: Mapping[int, int | None], steps: Iterable[int]) -> set[int]:
    """These steps and all that they depend on. `parents`: the parent of each step that exists; None
    of a full one."""
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
    """The steps that may go once a state is saved: all except the last `keep` (`saved`, the one
    just saved, is the last), the protected, and what these depend on. `parents`: as for
    `find_needed`."""
    others = sorted(step for step in parents if step != saved)
    last = others[max(0, len(others) - keep + 1) :]
    needed = find_needed(parents, [saved, *last, *protected])
    return sorted(set(parents) - needed)


# ---- checksums


def compute_checksum(path: Path) -> list[int]:
    """[bytes, CRC-32]. Detects damage by disks, memory and copies, about as fast as a disk reads;
    SHA-256 would take several times as long, and would not stop whoever can write the other files.
    Reads into memory of its own: a thread that trains meanwhile seldom waits for the
    interpreter."""
    size = total = 0
    room = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(room):
            size, total = size + count, zlib.crc32(room[:count], total)
    return [size, total]


def sum_state(state: dict[str, Any]) -> int:
    """The checksum of a state.json and of all files that it names. Deltas name their parent by
    it."""
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def write_state(folder: Path, state: dict[str, Any], name: str = _STATE) -> int:
    """Writes a state.json, with a checksum of everything else in it, and returns that."""
    plain = json.loads(json.dumps(state))  # as it will be read: keys are text
    checksum = sum_state(plain)
    # A line for each entry, and no indentation: json indents in Python, for tens of milliseconds in
    # which a step has to wait.
    lines = (f"{json.dumps(key)}: {json.dumps(of)}" for key, of in plain.items())
    text = ",\n".join([f'{{"checksum": {checksum}', *lines]) + "}"
    if isinstance(folder, StorePath):
        (folder / name).write_text(text)
        return checksum
    with open(folder / name, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return checksum


def read_json(path: Path) -> dict[str, Any]:
    """Reads what `write_state` wrote, and its checksum."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Damaged.advise(f"{path} is damaged ({error})") from None
    if not isinstance(state, dict):
        raise Damaged.advise(f"{path} is damaged (not a JSON object)")
    return state


def read_state(path: Path) -> dict[str, Any]:
    try:
        state = read_json(path / _STATE)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is not a checkpoint: it has no {_STATE}") from None
    form, checksum = state.get("format"), state.pop("checksum", None)
    # Format 1 has no checksum. All others do, also those of newer versions, so a newer checkpoint
    # is not mistaken for a damaged one.
    if checksum != (None if checksum is None and form == 1 else sum_state(state)):
        raise Damaged.advise(f"{path}/{_STATE} is damaged (its checksum does not match)")
    if form not in (1, FORMAT, DELTA_FORMAT):
        raise ValueError(
            f"{path} has checkpoint format {form}, this version of FreeScale reads 1 to "
            f"{DELTA_FORMAT}: use the newer version that wrote it"
        )
    return state
