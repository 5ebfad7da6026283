"""The folder in which a run publishes itself. A number is a state of the model.

    00000000.full/          an export, with which deltas begin
    00000001/               what has changed since number 0
    .writing-00000002/      not yet published

Each holds a delta.json with checksums of its files and of itself. A delta names its parent by
number and checksum: a chain belongs to one run. What is listed is whole: a rename publishes it.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freescale.train.state.disk import (
    Damaged,
    compute_checksum,
    read_json,
    sum_state,
    sync,
    write_state,
)

ABOUT, FORMAT = "delta.json", 1
_FULL = ".full"


class Missing(ValueError):
    """A delta that follows is not there, and neither is a full export after it."""


@dataclass(frozen=True)
class Manifest:
    """What a published folder says of itself. `about`: all of delta.json; `checksum`: what deltas
    name as their parent's. A full export made of deltas stands in for the last of these."""

    path: Path
    number: int
    step: int
    checksum: int
    about: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(size for size, _ in self.about["files"].values())

    def check_files(self) -> None:
        """Damaged if a file is not as it was written."""
        for name, written in self.about["files"].items():
            try:
                found = compute_checksum(self.path / name)
            except FileNotFoundError:
                raise Damaged(f"{self.path / name} is missing") from None
            if found != written:
                raise Damaged(f"{self.path / name} is damaged: its checksum does not match")

    def check_parent(self, parent: Manifest) -> None:
        """Damaged if this is not a delta to `parent`."""
        if self.about["parent"] != {"number": parent.number, "checksum": parent.checksum}:
            raise Damaged(f"{self.path} holds what changed since another state than {parent.path}")


@dataclass(frozen=True)
class DeltaFolder:
    """Reading is for any process; one publisher changes it."""

    folder: Path

    def list_numbers(self) -> tuple[list[int], list[int]]:
        """Numbers of full exports, and of deltas, ascending."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        full = [int(name[:-5]) for name in names if name.endswith(_FULL) and name[:-5].isdecimal()]
        return sorted(full), sorted(int(name) for name in names if name.isdecimal())

    def path(self, number: int, full: bool = False) -> Path:
        return self.folder / f"{number:08d}{_FULL if full else ''}"

    def read(self, number: int, full: bool = False) -> Manifest:
        """Damaged if its delta.json is."""
        path = self.path(number, full)
        about = read_json(path / ABOUT)
        checksum = about.pop("checksum", None)
        if checksum != sum_state(about) or about.get("number") != number:
            raise Damaged(f"{path / ABOUT} is damaged: its checksum does not match")
        if about["format"] != FORMAT:
            raise ValueError(
                f"{path} has format {about['format']}, this version of FreeScale reads {FORMAT}: "
                "use the newer version that wrote it"
            )
        return Manifest(path, number, about["step"], about.get("stands_for", checksum), about)

    # ---- the publisher

    def begin(self, number: int) -> Path:
        """An empty folder to write in. Clears what a killed process left."""
        for leftover in self.folder.glob(".writing-*"):
            shutil.rmtree(leftover)
        path = self.folder / f".writing-{number:08d}"
        path.mkdir(parents=True)
        return path

    def finish(self, path: Path, number: int, about: dict[str, Any]) -> Manifest:
        """Publishes what was written. `about`: `step`, `parent` and others."""
        full = about["parent"] is None
        files = {}
        for file in sorted(path.rglob("*")):
            if file.is_file():
                sync(file)
                files[str(file.relative_to(path))] = compute_checksum(file)
        made = {"format": FORMAT, "number": number, "published": time.time()}
        write_state(path, made | about | {"files": files}, ABOUT)
        sync(path)
        path.rename(self.path(number, full))
        sync(self.folder)
        return self.read(number, full)

    def prune(self, keep: int) -> None:
        """Removes full exports but the newest, and deltas that it contains but the last `keep`."""
        full, deltas = self.list_numbers()
        old = [number for number in deltas if number <= full[-1] and number <= deltas[-1] - keep]
        for path in [*(self.path(n, True) for n in full[:-1]), *map(self.path, old)]:
            going = path.with_name(f".writing-{path.name}")  # half removed, it must not be listed
            path.rename(going)
            shutil.rmtree(going)
