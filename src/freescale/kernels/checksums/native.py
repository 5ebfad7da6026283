"""The functions of `checksums.reference` in C: each in one pass over the memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.checksums.reference import BYTES, FACTORS, Words, cut_short
from freescale.kernels.native import address, load_native, require_native
from freescale.packed import view_bytes

_FACTORS = FACTORS.ctypes.data
_PART = 1024 * BYTES  # worth a thread


def is_there() -> bool:
    """Whether this process has the C functions."""
    return load_native() is not None


def sum_blocks(value: Tensor) -> Words:
    """As the reference. Large tensors use as many threads as torch: the caller is idle meanwhile,
    and one thread does not reach the memory's bandwidth."""
    data, threads = view_bytes(value), torch.get_num_threads()
    return _divide(data.numel(), threads, lambda begin, end: _pass_over(data[begin:end], None))


def sum_file(file: int, place: int, size: int, threads: int = 1) -> Words:

    def add(begin: int, end: int) -> Words:
        sums = np.empty(-(-(end - begin) // BYTES), np.uint64)
        arrays = _FACTORS, sums.ctypes.data
        count = require_native().sum_file(file, place + begin, end - begin, *arrays)
        if count < end - begin:
            raise cut_short(place + begin + count)
        return sums

    return _divide(size, threads, add)


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
    rows, source = rows.long().contiguous(), source.contiguous()
    assert into.is_contiguous() and into.dtype == source.dtype and sums.flags.c_contiguous
    assert into.shape[1:] == source.shape[1:]
    size = into[:1].numel() * into.element_size()
    require_native().replace_rows(
        *(rows.numel(), size, address(rows), address(source), packed),
        *(address(into), into.numel() * into.element_size(), _FACTORS, sums.ctypes.data),
    )
