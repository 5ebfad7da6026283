"""A memory file: named tensors and plain JSON, with checksums, in memory that a keeper can hold.

    preamble     magic, where the JSON is, how long, its checksum: written last
    tensors      each from a multiple of 64 bytes on
    JSON         {"tensors": {name: [dtype, shape, place, checksum]}, ...}

A file without its preamble is half written. The checksum of a tensor is the CRC-32 of one number
for each 32 KB: the sum of its words, each multiplied by an odd number of its own place, which no
change of one word leaves as it is. It takes a third of the time of a CRC-32 over all bytes.
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

import numpy as np
import torch
from torch import Tensor

from freescale.embedding.memory import get_available_memory
from freescale.train.checkpoint.files import Damaged

_PREAMBLE = struct.Struct("<8sQQI")
_MAGIC = b"FSSNAP01"
_ALIGN = 64
_WORDS = 4096  # of a checksum's block
_RESERVE = 0.95  # of the free memory that a file may take


def _draw_factors() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Odd numbers, the same everywhere: splitmix64 of the place."""
    place = np.arange(1, _WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (place ^ (place >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


_FACTORS = _draw_factors()


def sum_tensor(value: Tensor) -> int:
    """The checksum of a tensor on the host, contiguous."""
    data = _as_bytes(value)
    whole = data[: data.size - data.size % (_WORDS * 8)]
    blocks = np.matmul(whole.view(np.uint64).reshape(-1, _WORDS), _FACTORS)
    return zlib.crc32(data[whole.size :].data, zlib.crc32(blocks.data))


def _as_bytes(value: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return value.detach().reshape(-1).view(torch.uint8).numpy()


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
        """All of the file [size], shared with it."""
        memory = mmap.mmap(self.file, self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def read(self) -> dict[str, Tensor]:
        """All tensors, which share memory with the file."""
        return _view(self.data, self.header["tensors"])

    def verify(self, label: str) -> dict[str, Tensor]:
        """As `read`; Damaged, by `label`, if a tensor is not as it was written."""
        tensors = self.read()
        for name, (_, _, _, checksum) in self.header["tensors"].items():
            if sum_tensor(tensors[name]) != checksum:
                raise Damaged(f"{label} is damaged (the checksum of {name} does not match)")
        return tensors

    def close(self) -> None:
        """The memory stays as long as a keeper has it, or a tensor."""
        os.close(self.file)


def write_segment(
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    amend: Callable[[dict[str, Tensor]], None] | None = None,
) -> Segment:
    """Writes a memory file.

    Args:
        header: plain JSON.
        tensors: on the host.
        amend: changes the tensors of the file before they are sealed.

    Raises:
        OSError: there is not enough memory.
    """
    entries: dict[str, list[Any]] = {}
    place = _ALIGN
    for name, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        entries[name] = [dtype, list(value.shape), place, 0]
        place += -(-value.numel() * value.element_size() // _ALIGN) * _ALIGN
    if place > _RESERVE * get_available_memory(torch.device("cpu")):
        raise OSError(f"a snapshot of {place / 1e9:.1f} GB does not fit into the host's memory")
    file = os.memfd_create("freescale-snapshot", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, place)
        for name, value in tensors.items():
            _write(file, _as_bytes(value.contiguous()), entries[name][2])
            if amend is None:
                entries[name][3] = sum_tensor(value.contiguous())
        if amend is not None:
            shared = mmap.mmap(file, place, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            written = _view(torch.frombuffer(shared, dtype=torch.uint8), entries)
            amend(written)
            for name, value in written.items():
                entries[name][3] = sum_tensor(value)
        whole = dict(header) | {"tensors": entries}
        text = json.dumps(whole).encode()
        _write(file, np.frombuffer(text, np.uint8), place)
        preamble = _PREAMBLE.pack(_MAGIC, place, len(text), zlib.crc32(text))
        os.pwrite(file, preamble, 0)
        return Segment(file, place + len(text), json.loads(text))
    except BaseException:
        os.close(file)
        raise


def _write(file: int, data: np.ndarray[Any, np.dtype[np.uint8]], place: int) -> None:
    """Writing takes half the time of a copy into fresh mapped memory, page by page."""
    left = data.data
    while left:
        count = os.pwrite(file, left[: 1 << 30], place)
        left, place = left[count:], place + count


def _view(data: Tensor, entries: Mapping[str, list[Any]]) -> dict[str, Tensor]:
    found = {}
    for name, (dtype, shape, place, _) in entries.items():
        kind: torch.dtype = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        found[name] = data[place : place + size].view(kind).view(shape)
    return found
