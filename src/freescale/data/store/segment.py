"""A segment of an event store: a file per column. The events of a user lie next to each other, in
order of time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

USERS, STARTS, COUNTS, LASTS = "users", "starts", "counts", "lasts"  # files that are no columns
_COLUMNS = "columns"


class Segment:
    """Reads a segment. Its files are mapped when they are first read.

    Attributes:
        users: [users] ids, ascending.
        starts: [users] the first event of each.
        counts: [users] how many events each has.
        lasts: [users] the time of the last event of each.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.users, self.starts, self.counts, self.lasts = (
            _map(folder / f"{name}.npy") for name in (USERS, STARTS, COUNTS, LASTS)
        )
        self.column = lru_cache(None)(self._open_column)

    def _open_column(self, name: str) -> NDArray[Any]:
        """[events]"""
        return _map(_name_file(self.folder, name))

    def locate(self, users: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first event and the number of events of users [n]; 0 for those that are not here."""
        if not len(self.users):
            return np.zeros(len(users), np.int64), np.zeros(len(users), np.int64)
        place = np.searchsorted(self.users, users).clip(max=len(self.users) - 1)
        found = self.users[place] == users
        return np.where(found, self.starts[place], 0), np.where(found, self.counts[place], 0)

    def count_before(
        self, starts: NDArray[np.int64], counts: NDArray[np.int64], time: int
    ) -> NDArray[np.int64]:
        """[n]: how many of the events [starts, starts + counts) of users [n] are before a time: a
        binary search for all of them at once."""
        times, low, high = self.column("timestamp"), starts.copy(), starts + counts
        while (open_ := np.flatnonzero(low < high)).size:
            middle = (low[open_] + high[open_]) // 2
            before = times[middle] < time
            low[open_[before]] = middle[before] + 1
            high[open_[~before]] = middle[~before]
        return low - starts


class SegmentWriter:
    """Writes a segment, block by block, in memory of one block and of the users.

    Args:
        folder: is created.
        dtypes: of the columns.
    """

    def __init__(self, folder: Path, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        self._folder, self._events = folder, 0
        self._users: list[NDArray[np.int64]] = []
        self._counts: list[NDArray[np.int64]] = []
        self._lasts: list[NDArray[np.int64]] = []
        (folder / _COLUMNS).mkdir(parents=True)
        with ExitStack() as stack:
            self._columns = {
                name: _ColumnFile(stack.enter_context(open(_name_file(folder, name), "wb")), dtype)
                for name, dtype in dtypes.items()
            }
            self._open = stack.pop_all()

    def add(
        self,
        users: NDArray[np.int64],
        counts: NDArray[np.int64],
        values: Mapping[str, NDArray[Any]],
    ) -> None:
        """Adds the events of users [n], `counts` [n] each: columns [sum(counts)]."""
        some = counts > 0
        self._users.append(users[some])
        self._counts.append(counts[some])
        self._lasts.append(values["timestamp"][np.cumsum(counts[some]) - 1])
        self._events += int(counts.sum())
        for name, column in self._columns.items():
            column.write(values[name])

    def close(self) -> int:
        """Completes the files; returns the number of events. ValueError names a user that was
        added twice."""
        with self._open:
            for column in self._columns.values():
                column.close(self._events)
        users, counts, lasts = (
            np.concatenate([np.zeros(0, np.int64), *parts])
            for parts in (self._users, self._counts, self._lasts)
        )
        order = np.argsort(users, kind="stable")
        ordered = users[order]
        if (twice := np.flatnonzero(np.diff(ordered) == 0)).size:
            raise ValueError(
                f"user {ordered[twice[0]]} has two rows: make one history of them, in order of time"
            )
        starts = np.cumsum(counts) - counts
        about = {USERS: users, STARTS: starts, COUNTS: counts, LASTS: lasts}
        for name, values in about.items():
            np.save(self._folder / f"{name}.npy", values[order])
        return self._events


class _ColumnFile:
    """A .npy file that grows: its header is written again at the end."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]) -> None:
        self._file, self._dtype = file, dtype
        self._header = self._write_header(0)

    def _write_header(self, count: int) -> int:
        about = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (count,),
        }
        np.lib.format.write_array_header_1_0(self._file, about)
        return self._file.tell()

    def write(self, values: NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(values, self._dtype).data)

    def close(self, count: int) -> None:
        self._file.seek(0)
        assert self._write_header(count) == self._header  # numpy leaves room for larger numbers


def _name_file(folder: Path, column: str) -> Path:
    """Columns have the names that their files gave them."""
    return folder / _COLUMNS / f"{quote(column, safe='')}.npy"


def _map(path: Path) -> NDArray[Any]:
    """A file as a plain array: indexing a subclass is slower. np.load would parse its header by
    `ast`, which Python 3.11 cannot do in two threads (SystemError: recursion depth mismatch)."""
    with open(path, "rb") as file:
        head = file.read(256)
    ((kind, count),) = re.findall(rb"'descr': '(.+?)'.*'shape': \((\d+),\)", head)
    begin = 10 + int.from_bytes(head[8:10], "little")
    return np.asarray(np.memmap(path, kind.decode(), "r", begin, (int(count),)))
