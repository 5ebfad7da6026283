"""Checksums of host memory that stay right while its rows are replaced, in C: each in one pass.

The sum of a block of 4,096 words of 64 bits is the sum of its words, each multiplied by an odd
factor of its place, modulo 2**64: it changes with any word, and a changed row's words are enough to
update it. The last block is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.native import address, require_native
from freescale.packed import view_bytes

WORDS = 4096  # of a block
BYTES = 8 * WORDS

Words = np.ndarray[Any, np.dtype[np.uint64]]


def _draw_factors() -> Words:
    """Odd factors, the same on every machine: splitmix64 of the place."""
    place = np.arange(1, WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (place ^ (place >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


FACTORS = _draw_factors()
_FACTORS = FACTORS.ctypes.data
_PART = 1024 * BYTES  # worth a thread


def as_bytes(value: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes [n] of a contiguous tensor on the host, sharing its memory."""
    return view_bytes(value).numpy()


def sum_blocks(value: Tensor) -> Words:
    """The sums of a tensor's blocks. Large tensors use as many threads as torch: the caller is idle
    meanwhile, and one thread does not reach the memory's bandwidth."""
    data, threads = view_bytes(value), torch.get_num_threads()
    return _divide(data.numel(), threads, lambda begin, end: _pass_over(data[begin:end], None))


def sum_file(file: int, place: int, size: int, threads: int = 1) -> Words:
    """The sums of the blocks in `size` bytes of a file from `place` on. OSError if it is
    shorter."""

    def add(begin: int, end: int) -> Words:
        sums = np.empty(-(-(end - begin) // BYTES), np.uint64)
        arrays = _FACTORS, sums.ctypes.data
        count = require_native().sum_file(file, place + begin, end - begin, *arrays)
        if count < end - begin:
            raise cut_short(place + begin + count)
        return sums

    return _divide(size, threads, add)


def cut_short(place: int) -> OSError:
    """The error for a file that ends there."""
    return OSError(f"a file ends at byte {place}, where more of it was expected")


def _divide(size: int, most: int, add: Callable[[int, int], Words]) -> Words:
    """Joins the sums of add(begin, end) on parts of `size` bytes, in up to `most` threads."""
    threads = min(most, size // _PART)
    if threads < 2:
        return add(0, size)
    each = -(-size // threads // BYTES) * BYTES
    with ThreadPoolExecutor(threads) as pool:
        begins = range(0, size, each)
        return np.concatenate(list(pool.map(lambda at: add(at, min(at + each, size)), begins)))


def copy_blocks(value: Tensor, into: Tensor) -> Words:
    """Copies a tensor and returns the sums of its blocks."""
    assert into.shape == value.shape and into.dtype == value.dtype and into.is_contiguous()
    return _pass_over(value, into)


def _pass_over(value: Tensor, into: Tensor | None) -> Words:
    assert value.is_contiguous()
    size = value.numel() * value.element_size()
    sums = np.empty(-(-size // BYTES), np.uint64)
    arrays = address(value), address(into), _FACTORS, sums.ctypes.data
    require_native().sum_blocks(size, *arrays)
    return sums


def replace_rows(
    into: Tensor, sums: Words, rows: Tensor, source: Tensor, packed: bool = False
) -> None:
    """Sets into[rows] = source[rows], rows [n] int64, each once, and updates the sums of the blocks
    of `into` in place. `packed`: `source` has one row for each of `rows`."""
    rows, source = rows.long().contiguous(), source.contiguous()
    assert into.is_contiguous() and into.dtype == source.dtype and sums.flags.c_contiguous
    assert into.shape[1:] == source.shape[1:]
    size = into[:1].numel() * into.element_size()
    require_native().replace_rows(
        *(rows.numel(), size, address(rows), address(source), packed),
        *(address(into), into.numel() * into.element_size(), _FACTORS, sums.ctypes.data),
    )
