"""A folder into which files are moved. A file is a partition, its rows are offsets."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from freescale.data.ingest.sources import SourceFile
from freescale.data.stream.parsing import Parser
from freescale.data.stream.source import Chunk, Source

_UNFINISHED = (".tmp", ".part", ".crdownload", ".filepart", ".inprogress")
_BLOCK = 1 << 20

Stamp = tuple[int, int, int, int]  # inode, size, times of change


class FolderSource(Source):
    """Files in the order of their names: of those that are there, the first is read next."""

    def __init__(self, folder: str, parser: Parser) -> None:
        self.name, self._folder, self._parser = folder, Path(folder), parser
        self._known: dict[str, tuple[int, str, int]] = {}  # size, checksum, events of each file
        self._stamps: dict[str, Stamp] = {}  # stamp of each file when it was read or compared
        self._new: dict[str, list[Any]] = {}  # files that were read since `position`
        self.waiting = 0  # files that are not read yet

    def poll(self, seconds: float) -> Sequence[Chunk]:
        new = self._list_new()
        self.waiting = max(0, len(new) - 1)
        if not new:
            time.sleep(seconds)
            return []
        name = new[0]
        try:
            return self._read(name)
        except FileNotFoundError:  # taken away again
            return []

    def _list_new(self) -> list[str]:
        """Names of files that were not read. Those that were must be as they were."""
        new = []
        try:
            for entry in os.scandir(self._folder):
                if entry.name[0] in "._" or entry.name.endswith(_UNFINISHED):
                    continue
                if not entry.is_file():
                    continue
                if entry.name not in self._known:
                    new.append(entry.name)
                elif self._stamps.get(entry.name) != _stamp(entry.stat()):
                    self._compare(entry.name)
        except FileNotFoundError:  # the folder is gone, for a while
            return []
        return sorted(new)

    def _compare(self, name: str) -> None:
        """A file that was read has come again, or was touched: it must have the same content."""
        path = self._folder / name
        stamp, (size, checksum, events) = _stamp(path.stat()), self._known[name]
        if stamp[1] != size or _sum_file(path) != checksum:
            raise ValueError(
                f"{path} was written again after its events were read: move files into the folder "
                "once, under new names; what was trained cannot be taken back"
            )
        self.repeated += events if name in self._stamps else 0
        self._stamps[name] = stamp

    def _read(self, name: str) -> list[Chunk]:
        path = self._folder / name
        stamp, checksum = _stamp(path.stat()), _sum_file(path)
        found = self._parser.parse(SourceFile(path, str(path))) if stamp[1] else None
        if _stamp(path.stat())[1:3] != stamp[1:3]:
            raise ValueError(
                f"{path} changed while it was read: write files elsewhere, and move them into the "
                "folder when they are complete"
            )
        events = 0 if found is None else len(found)
        self._known[name], self._stamps[name] = (stamp[1], checksum, events), stamp
        self._new[name] = [stamp[1], checksum, events]
        if found is None:
            return []
        return [Chunk("", name, np.arange(events), found, True, stamp[2] / 1e9)]

    def position(self) -> dict[str, Any]:
        new, self._new = self._new, {}
        return {"files": new}

    def restore(self, position: Mapping[str, Any]) -> None:
        for name, (size, checksum, events) in position["files"].items():
            self._known[name] = (size, checksum, events)


class FilesSource(Source):
    """Files that are all there. Each has a clock of its own: none of their events is late."""

    name = "files"

    def __init__(self, files: Sequence[SourceFile], parser: Parser) -> None:
        self._files, self._parser = files, parser

    def poll(self, seconds: float) -> Sequence[Chunk]:
        found = [(str(file), self._parser.parse(file)) for file in self._files]
        return [
            Chunk(name, name, np.arange(len(events)), events, True, 0.0)
            for name, events in found
            if events is not None
        ]


def _stamp(stat: os.stat_result) -> Stamp:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _sum_file(path: Path) -> str:
    total = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            total.update(block)
    return total.hexdigest()
