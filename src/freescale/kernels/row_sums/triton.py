"""The sums of `row_sums.reference` as Triton kernels, for NVIDIA GPUs.

Rows: nothing is read from the device, and there are no atomics. After one sort each row's values
are added in order of appearance, in float32. The result for a row depends on that row alone.

Parts of ranks: one launch with the bits of the reference, which takes one launch per rank. These
sums run alongside a backward, in a thread whose every launch takes the interpreter's lock.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from freescale.kernels.jit.launch import (
    KernelModule,
    RowLaunch,
    count_blocks,
    launch_blocks,
    require_gpu,
)
from freescale.kernels.row_sums.reference import SortedRows, check_values

SUMS, CHUNKS = RowLaunch(1024, 4), RowLaunch(2048, 4)
UNROLL = 4  # values of a row in flight
# Wide rows: columns of a warp, and sorted positions of a program.
WARP_COLUMNS, SPAN = 512, 32
# Values of a row: longer rows are cut into chunks, to share a hot row among programs. A power of
# two, and so a multiple of a tile's rows.
CHUNK = 128
BLOCK = 1024
MAX_WIDTH = 4096  # of rows in `check_rows`
DTYPES = (torch.float32, torch.float64)  # of ranks' parts: torch adds these without a wider type
_kernels = KernelModule("freescale.kernels.row_sums.triton_kernels")


def spread_ids(ids: Tensor, out: Tensor, stride: int, rows: int, base: int) -> None:
    """out [n] = ids [n] * stride % rows + base: the places of a table's ids in its storage."""
    require_gpu(ids.device, "embedding.layout")
    launch_blocks(
        _kernels.spread_kernel, ids.device, ids.numel(), BLOCK, ids.contiguous(), out, ids.numel(),
        stride, rows, base, BLOCK=BLOCK,
    )  # fmt: skip


def sum_by_row(
    values: Tensor, rows: Tensor, count: int, onto: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    check_values(values, rows)
    require_gpu(values.device, "kernels.row_sums.reference")
    out = onto
    if out is None:
        out = values.new_zeros(count, values.shape[1], dtype=dtype)
    rows_sorted = SortedRows.of(rows.reshape(-1))
    if rows.ndim > 1:
        rows_sorted = replace(rows_sorted, order=rows_sorted.order // rows.shape[1])
    _launch_sums(rows_sorted, values.contiguous(), out, rows, dense=True, adds=onto is not None)
    return out


def sum_sorted(
    rows: SortedRows, values: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """As the reference, but (row numbers [n], sums [n, width]) by sorted position: the first
    position of a row has its number and sum, all others have -1 and no sum."""
    check_values(values, rows.order)
    require_gpu(values.device, "kernels.row_sums.reference")
    found, out = torch.empty_like(rows.rows), torch.empty_like(values, dtype=dtype)
    _launch_sums(rows, values.contiguous(), out, found, dense=False)
    return found, out


def _launch_sums(
    rows: SortedRows, values: Tensor, out: Tensor, found: Tensor, *, dense: bool, adds: bool = False
) -> None:
    if not values.numel():
        return
    shape, partial = shape_sums(SUMS, values.shape[1]), sum_chunks(rows, values)
    n, warps = rows.rows.numel(), shape["W"] // WARP_COLUMNS
    tensors = values, rows.rows, rows.order, partial, out, found
    if warps:
        launch_blocks(
            _kernels.wide_row_sums_kernel, values.device, n, SPAN, *tensors, n, DENSE=dense,
            ADDS=adds, CHUNK=CHUNK, UNROLL=UNROLL, SPAN=SPAN, WIDTH=shape["WIDTH"], W=shape["W"],
            num_warps=warps,
        )  # fmt: skip
        return
    launch_blocks(
        _kernels.row_sums_kernel, values.device, n, shape["R"], *tensors, n, DENSE=dense,
        ADDS=adds, **shape,
    )  # fmt: skip


def sum_chunks(rows: SortedRows, values: Tensor) -> Tensor:
    """The sums of the chunks of long rows, which the kernels' `sum_rows` reads."""
    n, width = rows.rows.numel(), values.shape[1]
    if n <= CHUNK:
        return values  # no row is long
    windows = count_blocks(n, CHUNK)
    partial = torch.empty(2 * windows, width, dtype=torch.float32, device=values.device)
    shape = CHUNKS.shape(width)
    shape["R"] = min(shape["R"], CHUNK)
    launch_blocks(
        _kernels.chunk_sums_kernel, values.device, 2 * windows, 1, values, rows.rows, rows.order,
        partial, n, n.bit_length(), CHUNK=CHUNK, **shape,
    )  # fmt: skip
    return partial


def shape_sums(launch: RowLaunch, width: int) -> dict[str, int]:
    """Arguments of a launch that sums rows of this width."""
    shape = launch.shape(width)
    # Triton 3.6 does not compile these sums for 8, 32 and 64 rows a program.
    if 16 < shape["R"] < 128:
        shape["R"] = 16
    elif shape["R"] == 8:
        shape["R"] = 4
    shape["R"] = min(shape["R"], CHUNK)
    return shape | {"CHUNK": CHUNK, "STEPS": CHUNK.bit_length(), "UNROLL": UNROLL}


def sum_in_order(parts: Tensor, copies: int) -> Tensor:
    require_gpu(parts.device, "kernels.row_sums.reference")
    assert parts.dtype in DTYPES and parts.is_contiguous()
    ranks, count = parts.shape
    total = torch.empty(copies * count, dtype=parts.dtype, device=parts.device)
    launch_blocks(
        _kernels.sum_in_order_kernel, parts.device, count, BLOCK, parts, total, count, ranks,
        copies, BLOCK=BLOCK,
    )  # fmt: skip
    return total


def check_rows(
    numbers: Tensor | None, dtypes: tuple[torch.dtype, ...] = (torch.float32,), **tables: Tensor
) -> None:
    """Checks row numbers and tables [n, width] before a launch: dtypes, one GPU, contiguity."""
    if numbers is not None and (
        numbers.dtype not in (torch.int64, torch.int32) or numbers.ndim != 1
    ):
        raise ValueError(
            "row numbers must be a 1-d tensor of int64 or int32, not "
            f"{numbers.dtype} with {numbers.ndim} axes"
        )
    for name, table in tables.items():
        if table.ndim != 2 or table.dtype not in dtypes:
            raise ValueError(
                f"{name} must be [n, width] of {' or '.join(map(str, dtypes))}, not "
                f"{table.dtype} {list(table.shape)}"
            )
        if not 1 <= table.shape[1] <= MAX_WIDTH:
            raise ValueError(
                f"the kernels are for rows 1 to {MAX_WIDTH} wide, not "
                f"{table.shape[1]}; use kernels.rows"
            )
        if name != "gradients" and not table.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous: {list(table.shape)} has strides {table.stride()}"
            )
    devices = {table.device for table in tables.values()} | (
        {numbers.device} if numbers is not None else set()
    )
    if len(devices) > 1:
        raise ValueError(f"tensors lie on different devices: {sorted(map(str, devices))}")
    require_gpu(devices.pop(), "kernels.rows")
