"""States in memory: named tensors and plain JSON with checksums, in files that outlive a rank.

    preamble     magic, place, length and checksum of the JSON: written last
    tensors      each starts at a multiple of 64 bytes
    JSON         {"tensors": {name: [dtype, shape, place, checksum]}, ...}

A file without its preamble is half written. The checksum of a tensor is the CRC-32 of the sums of
its blocks (kernels/checksums/native.py).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freescale.embedding.placement import get_available_memory
from freescale.kernels.checksums.native import (
    Words,
    as_bytes,
    copy_blocks,
    replace_rows,
    sum_blocks,
    sum_file,
)
from freescale.train.state.disk import Damaged
from freescale.train.state.file_reads import FileReads
from freescale.transport.api import Transport, gather_json

_PIECE = 1 << 23  # bytes to each rank at once


def create_file(size: int) -> int:
    """The descriptor of a new memory file."""
    file = os.memfd_create("freescale-snapshot", os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    return file


def exchange_files(transport: Transport, outgoing: Mapping[int, Tensor]) -> dict[int, int]:
    """Sends bytes [n] on the host to some ranks, by rank, and receives what others send: the
    descriptors of memory files, by rank. A collective. Urgent traffic passes between two pieces."""
    rank, world = transport.rank, transport.world
    sizes = {str(peer): data.numel() for peer, data in outgoing.items()}
    everyones = gather_json(transport, sizes)
    table = [[int(part.get(str(peer), 0)) for peer in range(world)] for part in everyones]
    files: dict[int, int] = {}
    try:
        for peer in range(world):
            if table[peer][rank]:
                files[peer] = create_file(table[peer][rank])
        for begin in range(0, max(max(row) for row in table), _PIECE):
            send = [_cut(table[rank][peer], begin) for peer in range(world)]
            receive = [_cut(table[peer][rank], begin) for peer in range(world)]
            parts = [outgoing[peer][begin : begin + size] for peer, size in enumerate(send) if size]
            data = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
            arrived = transport.all_to_all(data, send, receive, "rows").wait(host=True)
            for peer, piece in enumerate(torch.split(arrived, receive)):
                if len(piece):
                    os.pwrite(files[peer], piece.numpy().data, begin)
    except BaseException:
        for file in files.values():
            os.close(file)
        raise
    return files


def _cut(size: int, begin: int) -> int:
    return max(0, min(_PIECE, size - begin))


_PREAMBLE = struct.Struct("<8sQQI")
_MAGIC = b"FSSNAP01"
_ALIGN = 64
_RESERVE = 0.95  # share of the free memory that a file may take

Entries = dict[str, list[Any]]  # of the JSON


def sum_tensor(value: Tensor) -> int:
    """The checksum of a contiguous tensor on the host."""
    return _join_sums(sum_blocks(value))


def _join_sums(blocks: Words) -> int:
    return zlib.crc32(blocks.data)


@dataclass
class Segment:
    """A memory file that is complete."""

    file: int
    size: int
    header: dict[str, Any]

    @staticmethod
    def open(file: int, label: str) -> Segment:
        """Takes over a descriptor. Damaged, with `label`, if the file is half written."""
        try:
            size = os.fstat(file).st_size
            found = os.pread(file, _PREAMBLE.size, 0)
            magic, place, length, checksum = (
                _PREAMBLE.unpack(found) if len(found) == _PREAMBLE.size else (b"", 0, 0, 0)
            )
            text = os.pread(file, length, place) if place + length <= size else b""
            if magic != _MAGIC or len(text) != length or zlib.crc32(text) != checksum:
                raise Damaged(f"{label} is half written, or damaged")
            return Segment(file, size, json.loads(text))
        except BaseException:
            os.close(file)
            raise

    @property
    def data(self) -> Tensor:
        """The bytes of the file [size], shared with it. Pages are mapped when they are read."""
        return _map(self.file, self.size, populate=False)

    def read(self) -> dict[str, Tensor]:
        """All tensors, which share memory with the file."""
        return _view_tensors(self.data, self.header["tensors"])

    def verify(self, label: str, threads: int = 1) -> dict[str, Tensor]:
        """As `read`; Damaged, with `label`, if a tensor is not as it was written."""
        tensors = self.read()
        for name, (_, _, place, checksum) in self.header["tensors"].items():
            sums = sum_file(self.file, place, tensors[name].nbytes, threads)
            if _join_sums(sums) != checksum:
                raise Damaged(f"{label} is damaged (the checksum of {name} does not match)")
        return tensors

    def copy(self, name: str, to: Tensor, reads: FileReads) -> None:
        """Copies a tensor into `to`; a GPU's stream may still be copying when this returns."""
        dtype, shape, place, _ = self.header["tensors"][name]
        alike = to.dtype == getattr(torch, dtype) and list(to.shape) == shape
        if alike and to.is_contiguous():
            reads.read(self.file, place, to)
        else:
            to.copy_(self.read()[name])

    def close(self) -> None:
        """The memory stays as long as a holder or a tensor uses it."""
        os.close(self.file)


class StateFile:
    """A memory file with a rank's whole state, which the next snapshot but one updates in place:
    rows that have changed are replaced. Tables have their names in the file.

    A rank has two of them and uses them in turn, so that one is always complete. Its buddy has two
    more, which receive the same changes. All keep their memory: fresh pages take longer than
    copies.
    """

    def __init__(self, consumer: str) -> None:
        self.consumer = consumer  # rows that changed since it was written are marked for it
        self.step: int | None = None  # which its tables are of; None: they are not whole
        self.tables: dict[str, Tensor] = {}  # share memory with it
        self._entries: Entries = {}
        self._end = 0
        self._file = create_file(0)
        self._close = weakref.finalize(self, os.close, self._file)
        self._sums: dict[str, Words] = {}

    @property
    def current(self) -> bool:
        """Whether the next snapshot needs to replace only the rows marked for it."""
        return self.step is not None

    def reserve(self, tables: Mapping[str, Tensor]) -> None:
        """Makes room for tables (any device), unless it is there. OSError if they do not fit."""
        if tables.keys() <= self.tables.keys():
            return
        begin = -(-self._end // mmap.PAGESIZE) * mmap.PAGESIZE
        entries, end = _lay_out(tables, begin or _ALIGN)
        _check_room(end - begin)
        os.ftruncate(self._file, end)
        self.tables |= _view_tensors(_map(self._file, end, begin), entries, begin)
        self._entries, self._end = self._entries | entries, end

    def begin(self) -> None:
        """From now on it is half written."""
        self.step = None
        os.pwrite(self._file, bytes(_PREAMBLE.size), 0)

    def fill(self, name: str, value: Tensor) -> None:
        """Writes a table, on the host."""
        self._sums[name] = copy_blocks(value.contiguous(), self.tables[name])

    def replace(self, name: str, rows: Tensor, source: Tensor, packed: bool = False) -> None:
        """Writes rows [n] of a table on the host, or if `packed`, of [n, ...]."""
        into, sums = self.tables[name], self._sums[name]
        replace_rows(into, sums, rows, source, packed)

    def copy_tables(self, other: StateFile) -> None:
        """Copies another file of the same tables, which is complete; from then on it lacks only the
        rows marked for it. OSError if they do not fit."""
        self.begin()
        self.reserve(other.tables)
        for name, value in other.tables.items():
            self.tables[name].copy_(value)
            self._sums[name] = other._sums[name].copy()
        self.step = other.step

    def update(
        self, since: int | None, tensors: Mapping[str, Tensor], last: StateFile
    ) -> dict[str, Tensor]:
        """Writes the tables that a rank sends to its buddy: whole, or what changed since a step,
        which this file has, or else `last`, the snapshot before. Returns the other tensors."""
        if since is not None and self.step != since:
            self.copy_tables(last)
        if since is not None and self.step != since:
            raise Damaged(f"changes since step {since} do not fit tables of step {last.step}")
        self.begin()
        whole = {name: value for name, value in tensors.items() if name.startswith("table/")}
        self.reserve(whole)
        for name, value in whole.items():
            self.fill(name, value)
        for name, parts in group_tables(self.tables).items():
            if (rows := tensors.get(f"changed/{name}/positions")) is not None:
                for part in parts:
                    values = tensors[f"changed/{name}/{part}"]
                    self.replace(f"table/{name}/{part}", rows.long(), values, packed=True)
        return {
            name: value
            for name, value in tensors.items()
            if not name.startswith(("table/", "changed/"))
        }

    def seal(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Segment:
        """Adds the other tensors, once the tables are written; the header names the step. The
        segment has a descriptor of its own. OSError if they do not fit."""
        assert self._sums.keys() == self.tables.keys()
        entries, end = _lay_out(tensors, self._end or _ALIGN)
        _check_room(end - os.fstat(self._file).st_size)
        _write_tensors(self._file, entries, tensors)
        for name, sums in self._sums.items():
            self._entries[name][3] = _join_sums(sums)
        segment = _seal(os.dup(self._file), header, self._entries | entries, end)
        self.step = header.get("step")
        return segment

    def close(self) -> None:
        """The memory stays as long as a holder has it."""
        self._close()
        self.tables.clear()


def write_segment(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Segment:
    """Writes a memory file of tensors on the host, with plain JSON. OSError for want of memory."""
    with closing(StateFile("")) as file:
        return file.seal(header, tensors)


def group_tables(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors of tables, by name and part."""
    tables: dict[str, dict[str, Tensor]] = {}
    for label, value in tensors.items():
        if label.startswith("table/"):
            name, _, part = label.removeprefix("table/").rpartition("/")
            tables.setdefault(name, {})[part] = value
    return tables


# ---- the parts of a file


def _check_room(size: int) -> None:
    """OSError if there is not enough memory."""
    if size > _RESERVE * get_available_memory(torch.device("cpu")):
        raise OSError(f"a snapshot of {size / 1e9:.1f} GB does not fit into the host's memory")


def _lay_out(tensors: Mapping[str, Tensor], place: int = _ALIGN) -> tuple[Entries, int]:
    """(entries without checksums of tensors one after the other from `place` on, their end)."""
    entries: Entries = {}
    for name, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        entries[name] = [dtype, list(value.shape), place, 0]
        place += -(-value.numel() * value.element_size() // _ALIGN) * _ALIGN
    return entries, place


def _map(file: int, end: int, begin: int = 0, *, populate: bool = True) -> Tensor:
    """Bytes [begin, end) of a memory file, shared with it; `begin` is a multiple of the page size.
    `populate`: all pages are mapped at once."""
    how = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    memory = mmap.mmap(file, end - begin, flags=how, offset=begin)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _view_tensors(data: Tensor, entries: Entries, begin: int = 0) -> dict[str, Tensor]:
    """The tensors in the bytes of a file, from `begin` on."""
    found = {}
    for name, (dtype, shape, place, _) in entries.items():
        kind: torch.dtype = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        found[name] = data[place - begin : place - begin + size].view(kind).view(shape)
    return found


def _write_tensors(file: int, entries: Entries, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors where their entries say, and their checksums into the entries. Into fresh
    memory this takes half the time of a copy page by page."""
    for name, given in tensors.items():
        value = given.contiguous()
        left, place = as_bytes(value).data, entries[name][2]
        while left:
            count = os.pwrite(file, left[: 1 << 30], place)
            left, place = left[count:], place + count
        entries[name][3] = sum_tensor(value)


def _seal(file: int, header: Mapping[str, Any], entries: Entries, end: int) -> Segment:
    """Writes the JSON after the tensors, then the preamble. The segment takes the descriptor."""
    text = json.dumps(dict(header) | {"tensors": entries}).encode()
    os.ftruncate(file, end + len(text))  # the file may have been longer
    os.pwrite(file, text, end)
    os.pwrite(file, _PREAMBLE.pack(_MAGIC, end, len(text), zlib.crc32(text)), 0)
    return Segment(file, end + len(text), json.loads(text))
