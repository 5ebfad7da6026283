"""Table rows as Triton kernels, for NVIDIA GPUs: the functions of `rows.reference`, and reads of
fetched rows by many tokens. There are no atomics: a row's result has the same bits whichever other
rows are in the call. A row number of -1 means no row; others are not checked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from freescale.kernels.jit.launch import KernelModule, RowLaunch, launch_blocks
from freescale.kernels.requests.triton import GroupedKeys, deduplicate
from freescale.kernels.row_sums.triton import check_rows, sum_by_row
from freescale.kernels.rows.gradients import RowGradients

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_kernels = KernelModule("freescale.kernels.rows.triton_kernels")
# A warp reads a row of 128 floats with one instruction of 16 bytes a thread. With 4 warps, 2048
# elements are 4 such loads in flight per thread, 8 KB a program.
GATHER = RowLaunch(2048, 4)
SEGMENTS = RowLaunch(1024, 4)
UNROLL = 4  # rows of a segment in flight


def gather_rows(weight: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As the reference. The output for a row number of -1 is zero."""
    check_rows(rows, dtypes=DTYPES, weight=weight)
    return _launch_gather(weight, rows[:, None], dtype or weight.dtype)


def _launch_gather(weight: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """rows [n, places] -> [n, width]: sums over the places."""
    count, places = rows.shape
    out = torch.empty(count, weight.shape[1], dtype=dtype, device=weight.device)
    shape = GATHER.shape(weight.shape[1])
    launch_blocks(
        _kernels.gather_kernel, weight.device, count, shape["R"], weight, rows.contiguous(), out,
        count, places, **shape,
    )  # fmt: skip
    return out


def read_rows(
    rows: Tensor, index: Tensor, gradients: RowGradients | None = None, part: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """rows [u, width], index [...] into them -> [..., width], as `torch.nn.functional.embedding`,
    in another dtype if one is given. Backward sums the gradients of each row's tokens in float32
    (see row_sums), or adds them to a part of `gradients`."""
    check_rows(index.reshape(-1), dtypes=DTYPES, rows=rows)
    if gradients is not None:
        kept: Tensor = _Leave.apply(  # type: ignore[no-untyped-call]
            gradients.anchor, rows, index, gradients, part, dtype
        )
        return kept
    if rows.shape[0] >= 2**31:
        raise ValueError(f"fewer than 2^31 fetched rows can be read, not {rows.shape[0]}")
    out: Tensor = _Read.apply(rows, index, False, dtype)  # type: ignore[no-untyped-call]
    return out


def sum_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows [u, width], index [n, places] into them, -1 for nothing -> [n, width]: sums of rows."""
    check_rows(index.reshape(-1), dtypes=DTYPES, rows=rows)
    out: Tensor = _Read.apply(rows, index, True)  # type: ignore[no-untyped-call]
    return out


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, index, sums=False, dtype=None):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(index)
        ctx.count, ctx.sums, ctx.dtype = rows.shape[0], sums, rows.dtype
        if sums:
            return _launch_gather(rows, index, rows.dtype)
        return gather_rows(rows, index.reshape(-1), dtype).view(*index.shape, rows.shape[1])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (index,) = ctx.saved_tensors
        index = index if ctx.sums else index.reshape(-1)
        values = grad.reshape(-1, grad.shape[-1])
        sums = sum_by_row(values, index.to(torch.int32), ctx.count, dtype=ctx.dtype)
        return sums, None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, rows, index, gradients, part, dtype):  # type: ignore[no-untyped-def]
        ctx.index, ctx.gradients, ctx.part = index, gradients, part
        return gather_rows(rows, index.reshape(-1), dtype).view(*index.shape, rows.shape[1])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.gradients.add(ctx.part, ctx.index, grad)
        return (None,) * 6


def group_duplicates(rows: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """As the reference, but nothing is read from the device: both results have length r, with -1
    and no sums behind the last unique row."""
    last = torch.full((1,), torch.iinfo(torch.int64).max, device=rows.device)
    found = deduplicate(rows.long(), last)

    def sum_gradients(gradients: Tensor) -> tuple[Tensor, Tensor]:
        check_rows(rows, dtypes=DTYPES, gradients=gradients)
        assert gradients.shape[0] == rows.numel(), gradients.shape
        return found.keys, _sum_segments(gradients.contiguous(), found)

    return sum_gradients


def _sum_segments(values: Tensor, found: GroupedKeys) -> Tensor:
    """values [n, width] -> [n, width]: the sums of those of each key, as many as there are."""
    segments, width = found.starts.numel() - 1, values.shape[1]
    out = torch.empty(segments, width, dtype=values.dtype, device=values.device)
    shape = SEGMENTS.shape(width)
    if 16 < shape["R"] < 128:
        shape["R"] = 16  # Triton 3.6 does not compile it for 32 and 64 rows a program
    launch_blocks(
        _kernels.segments_kernel, values.device, segments, shape["R"], values, found.order,
        found.starts, out, found.counts, KEPT=True, UNROLL=UNROLL, **shape,
    )  # fmt: skip
    return out
