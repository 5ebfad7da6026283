"""A memory file: named tensors and plain JSON, with checksums, in memory that a holder can keep.

    preamble     magic, where the JSON is, how long, its checksum: written last
    tensors      each from a multiple of 64 bytes on
    JSON         {"tensors": {name: [dtype, shape, place, checksum]}, ...}

A file without its preamble is half written. The checksum of a tensor is the CRC-32 of the sums of
its blocks (kernels/checksums/reference.py).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freescale.embedding.memory import get_available_memory
from freescale.kernels.checksums.reference import Words, as_bytes
from freescale.kernels.dispatch.checksums import choose_checksums
from freescale.train.state.file_reads import FileReads
from freescale.train.state.files import Damaged

_PREAMBLE = struct.Struct("<8sQQI")
_MAGIC = b"FSSNAP01"
ALIGN = 64
_RESERVE = 0.95  # of the free memory that a file may take

Entries = dict[str, list[Any]]  # of the JSON


def sum_tensor(value: Tensor) -> int:
    """The checksum of a tensor on the host, contiguous."""
    return join_sums(choose_checksums().sum_blocks(value))


def join_sums(blocks: Words) -> int:
    """The checksum of a tensor whose blocks have these sums."""
    return zlib.crc32(blocks.data)


@dataclass
class Segment:
    """A memory file that is written."""

    file: int
    size: int
    header: dict[str, Any]

    @staticmethod
    def open(file: int, label: str) -> Segment:
        """Of a descriptor, which it takes over. Damaged, by `label`, if it is half written."""
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
        """All of the file [size], shared with it. Its pages come when they are looked at."""
        return map_file(self.file, self.size, populate=False)

    def read(self) -> dict[str, Tensor]:
        """All tensors, which share memory with the file."""
        return view_tensors(self.data, self.header["tensors"])

    def verify(self, label: str, threads: int = 1) -> dict[str, Tensor]:
        """As `read`; Damaged, by `label`, if a tensor is not as it was written."""
        tensors = self.read()
        for name, (_, _, place, checksum) in self.header["tensors"].items():
            sums = choose_checksums().sum_file(self.file, place, tensors[name].nbytes, threads)
            if join_sums(sums) != checksum:
                raise Damaged(f"{label} is damaged (the checksum of {name} does not match)")
        return tensors

    def copy(self, name: str, to: Tensor, reads: FileReads) -> None:
        """Copies a tensor to where it belongs; on a GPU by the current stream, which may still be
        at it when this returns."""
        dtype, shape, place, _ = self.header["tensors"][name]
        alike = to.dtype == getattr(torch, dtype) and list(to.shape) == shape
        if alike and to.is_contiguous():
            reads.read(self.file, place, to)
        else:
            to.copy_(self.read()[name])

    def close(self) -> None:
        """The memory stays as long as a holder has it, or a tensor."""
        os.close(self.file)


def write_segment(
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    amend: Callable[[dict[str, Tensor]], None] | None = None,
) -> Segment:
    """Writes a memory file of tensors on the host; the header is plain JSON. `amend` changes the
    tensors of the file before they are sealed. OSError if there is not enough memory."""
    entries, end = lay_out(tensors)
    file = create_file(end)
    try:
        write_tensors(file, entries, tensors, sums=amend is None)
        if amend is not None:
            written = view_tensors(map_file(file, end), entries)
            amend(written)
            for name, value in written.items():
                entries[name][3] = sum_tensor(value)
        return seal_file(file, header, entries, end)
    except BaseException:
        os.close(file)
        raise


# ---- the parts of a file


def lay_out(tensors: Mapping[str, Tensor], place: int = ALIGN) -> tuple[Entries, int]:
    """Entries without checksums of tensors that lie one behind the other, from `place` on; where
    they end."""
    entries: Entries = {}
    for name, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        entries[name] = [dtype, list(value.shape), place, 0]
        place += -(-value.numel() * value.element_size() // ALIGN) * ALIGN
    return entries, place


def create_file(size: int) -> int:
    """The descriptor of a memory file. OSError if there is not enough memory."""
    check_room(size)
    file = os.memfd_create("freescale-snapshot", os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    return file


def check_room(size: int) -> None:
    """OSError if there is not enough memory."""
    if size > _RESERVE * get_available_memory(torch.device("cpu")):
        raise OSError(f"a snapshot of {size / 1e9:.1f} GB does not fit into the host's memory")


def map_file(file: int, end: int, begin: int = 0, *, populate: bool = True) -> Tensor:
    """Bytes [begin, end) of a memory file, shared with it; `begin` is a multiple of its pages.
    `populate`: all of its pages are there at once."""
    how = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    memory = mmap.mmap(file, end - begin, flags=how, offset=begin)
    return torch.frombuffer(memory, dtype=torch.uint8)


def view_tensors(
    data: Tensor, entries: Mapping[str, list[Any]], begin: int = 0
) -> dict[str, Tensor]:
    """The tensors in the bytes of a file, from `begin` on."""
    found = {}
    for name, (dtype, shape, place, _) in entries.items():
        kind: torch.dtype = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        found[name] = data[place - begin : place - begin + size].view(kind).view(shape)
    return found


def write_tensors(
    file: int, entries: Entries, tensors: Mapping[str, Tensor], sums: bool = True
) -> None:
    """Puts tensors where their entries say, and with `sums` their checksums there. Into fresh
    memory that takes half the time of a copy page by page."""
    for name, given in tensors.items():
        value = given.contiguous()
        left, place = as_bytes(value).data, entries[name][2]
        while left:
            count = os.pwrite(file, left[: 1 << 30], place)
            left, place = left[count:], place + count
        if sums:
            entries[name][3] = sum_tensor(value)


def seal_file(file: int, header: Mapping[str, Any], entries: Entries, end: int) -> Segment:
    """Writes the JSON behind the tensors, then the preamble. The segment takes the descriptor."""
    text = json.dumps(dict(header) | {"tensors": entries}).encode()
    os.ftruncate(file, end + len(text))  # what was there before may have been longer
    os.pwrite(file, text, end)
    os.pwrite(file, _PREAMBLE.pack(_MAGIC, end, len(text), zlib.crc32(text)), 0)
    return Segment(file, end + len(text), json.loads(text))


def unseal_file(file: int) -> None:
    """From now on it is half written."""
    os.pwrite(file, bytes(_PREAMBLE.size), 0)
