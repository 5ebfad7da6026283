"""Checksums of host memory that stay right while its rows are replaced.

The sum of a block of 4,096 words of 64 bits is the sum of its words, each multiplied by an odd
factor of its place, modulo 2**64: it changes with any word, and a changed row's words are enough to
update it. The last block is padded with zeros.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.packed import view_bytes

WORDS = 4096  # of a block
BYTES = 8 * WORDS
_READ = 32 * BYTES  # read from a file at a time

Words = np.ndarray[Any, np.dtype[np.uint64]]


def _draw_factors() -> Words:
    """Odd factors, the same on every machine: splitmix64 of the place."""
    place = np.arange(1, WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (place ^ (place >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


FACTORS = _draw_factors()


def as_bytes(value: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes [n] of a contiguous tensor on the host, sharing its memory."""
    return view_bytes(value).numpy()


def sum_blocks(value: Tensor) -> Words:
    """The sums of a tensor's blocks."""
    data = as_bytes(value)
    whole = data[: data.size - data.size % BYTES]
    sums: Words = np.matmul(whole.view(np.uint64).reshape(-1, WORDS), FACTORS)
    if whole.size == data.size:
        return sums
    last = np.zeros(BYTES, np.uint8)
    last[: data.size - whole.size] = data[whole.size :]
    return np.append(sums, np.dot(last.view(np.uint64), FACTORS))


def sum_file(file: int, place: int, size: int, threads: int = 1) -> Words:
    """The sums of the blocks in `size` bytes of a file from `place` on. OSError if it is
    shorter."""
    parts = [np.empty(0, np.uint64)]
    for begin in range(0, size, _READ):
        count = min(_READ, size - begin)
        data = os.pread(file, count, place + begin)
        if len(data) < count:
            raise cut_short(place + begin + len(data))
        parts.append(sum_blocks(torch.frombuffer(bytearray(data), dtype=torch.uint8)))
    return np.concatenate(parts)


def cut_short(place: int) -> OSError:
    """The error for a file that ends there."""
    return OSError(f"a file ends at byte {place}, where more of it was expected")


def copy_blocks(value: Tensor, into: Tensor) -> Words:
    """Copies a tensor and returns the sums of its blocks."""
    into.copy_(value)
    return sum_blocks(into)


def replace_rows(
    into: Tensor, sums: Words, rows: Tensor, source: Tensor, packed: bool = False
) -> None:
    """Sets into[rows] = source[rows], rows [n] int64, each once, and updates the sums of the blocks
    of `into` in place. `packed`: `source` has one row for each of `rows`."""
    into.index_copy_(0, rows, source if packed else source.index_select(0, rows))
    sums[:] = sum_blocks(into)
