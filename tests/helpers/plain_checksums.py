"""The checksums of `kernels/checksums/native.py` in numpy: what those in C are compared with."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.checksums.native import (
    BYTES,
    FACTORS,
    WORDS,
    Words,
    as_bytes,
    cut_short,
)

_READ = 32 * BYTES  # read from a file at a time


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
