"""Rows copied by their numbers by a GPU, where one of both tables may be in the host's memory, if
that is pinned: the GPU reads and writes it itself, and neither a core of the host nor a buffer on
the way takes part. The twin of `native.row_copies`."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.triton.launch import (
    RowLaunch,
    count_blocks,
    launch_kernel,
    require_gpu,
    use_device,
)

COPY = RowLaunch(8192, 16)
# While a program waits for the bus, kernels that need all registers of a multiprocessor wait for
# the program: few of them, each with as many bytes on their way as it can hold.
PROGRAMS = 16


def copy_rows(to: Tensor, to_rows: Tensor, source: Tensor, rows: Tensor) -> None:
    """to[to_rows] = source[rows], for row numbers [n] int64 on the GPU. No row of `to` comes
    twice."""
    require_gpu(rows.device, "kernels.native.row_copies")
    assert to.is_contiguous() and source.is_contiguous() and to.dtype == source.dtype
    assert to_rows.dtype == rows.dtype == torch.int64 and to.shape[1:] == source.shape[1:]
    width = torch.Size(to.shape[1:]).numel()
    if not rows.numel() or not width:
        return
    from freescale.kernels.triton.row_copies_kernels import copy_rows_kernel

    shape = COPY.shape(width)
    programs = min(PROGRAMS, count_blocks(rows.numel(), shape["R"]))
    with use_device(rows.device):
        launch_kernel(
            copy_rows_kernel, (programs,), to, to_rows, source, rows, rows.numel(), **shape
        )
