"""Copies of rows by their numbers in host memory, in C.

torch gathers with several threads, but scatters column by column, and its threads spin between two
calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.native import address, load_native, require_native
from freescale.worker_server import count_cores

_MOST_THREADS = 16


def fits(*tensors: Tensor) -> bool:
    """Whether C can copy rows of these tensors."""
    return load_native() is not None and all(
        tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors
    )


def copy_rows(to: Tensor, to_rows: Tensor | None, source: Tensor, rows: Tensor | None) -> None:
    """to[to_rows] = source[rows], row numbers [n] int64; None: the first n in order. The rows of
    `to` are distinct."""
    counts = [each.numel() for each in (to_rows, rows) if each is not None]
    assert to.dtype == source.dtype and to.shape[1:] == source.shape[1:] and len(set(counts)) == 1
    width = torch.Size(to.shape[1:]).numel() * to.element_size()
    to_rows, rows = (None if each is None else each.contiguous() for each in (to_rows, rows))
    arrays = map(address, (to, to_rows, source, rows))
    require_native().copy_rows(counts[0], width, *arrays, min(_MOST_THREADS, count_cores()))
