"""A memory file with a rank's whole state, which the next snapshot but one brings up to date where
it lies: rows that have changed are replaced, and nothing else of the tables is touched.

A rank has two of them and takes them in turn, so that one is complete at any time; the second one
begins as a copy of the first. Their memory is there from the first snapshot on: fresh pages would
take longer than the copies.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from freescale.kernels.checksums.reference import Words
from freescale.kernels.dispatch.checksums import choose_checksums
from freescale.train.state.segment import (
    ALIGN,
    Entries,
    Segment,
    check_room,
    create_file,
    join_sums,
    lay_out,
    map_file,
    seal_file,
    unseal_file,
    view_tensors,
    write_tensors,
)


class StateFile:
    """Tables have the names that they have in the file."""

    def __init__(self, consumer: str) -> None:
        self.consumer = consumer  # under which rows are marked that changed since it was written
        self.current = False  # whether it lacks nothing but these
        self.tables: dict[str, Tensor] = {}  # which share memory with it
        self._entries: Entries = {}
        self._end = 0
        self._file = create_file(0)
        self._close = weakref.finalize(self, os.close, self._file)
        self._sums: dict[str, Words] = {}

    def reserve(self, tables: Mapping[str, Tensor]) -> None:
        """Makes room for tables (any device), unless it is there. OSError if they do not fit."""
        if tables.keys() <= self.tables.keys():
            return
        begin = -(-self._end // mmap.PAGESIZE) * mmap.PAGESIZE
        entries, end = lay_out(tables, begin or ALIGN)
        check_room(end - begin)
        os.ftruncate(self._file, end)
        self.tables |= view_tensors(map_file(self._file, end, begin), entries, begin)
        self._entries, self._end = self._entries | entries, end

    def begin(self) -> None:
        """The state in it is no longer one."""
        self.current = False
        unseal_file(self._file)

    def fill(self, name: str, value: Tensor) -> None:
        """Writes a table, on the host."""
        self._sums[name] = choose_checksums().copy_blocks(value.contiguous(), self.tables[name])

    def replace(self, name: str, rows: Tensor, source: Tensor, packed: bool = False) -> None:
        """Writes rows [n] of a table on the host, or where `packed`, of [n, ...]."""
        into, sums = self.tables[name], self._sums[name]
        choose_checksums().replace_rows(into, sums, rows, source, packed)

    def copy_tables(self, other: StateFile) -> None:
        """Takes over all that is in another file of the same tables, which is complete; from then
        on it lacks only the rows marked for it. OSError if they do not fit."""
        self.begin()
        self.reserve(other.tables)
        for name, value in other.tables.items():
            self.tables[name].copy_(value)
            self._sums[name] = other._sums[name].copy()
        self.current = True

    def seal(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Segment:
        """Once the tables are written: adds what is beside them. The segment's descriptor is its
        own."""
        assert self._sums.keys() == self.tables.keys()
        entries, end = lay_out(tensors, self._end or ALIGN)
        write_tensors(self._file, entries, tensors)
        for name, sums in self._sums.items():
            self._entries[name][3] = join_sums(sums)
        segment = seal_file(os.dup(self._file), header, self._entries | entries, end)
        self.current = True
        return segment

    def close(self) -> None:
        """The memory stays as long as a holder has it."""
        self._close()
        self.tables.clear()
