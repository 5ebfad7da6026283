"""The sums of `row_sums.reference` as Triton kernels, for NVIDIA GPUs.

Rows: nothing is read from the device and nothing is added with atomics. One sort, then each row's
values in the order in which they came, in float32. The result for a row depends on that row alone.

Parts of ranks: one launch with the bits of the reference, which takes one launch per rank. These
sums run alongside a backward, in a thread whose every launch takes the interpreter's lock.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.jit.launch import (
    RowLaunch,
    count_blocks,
    launch_kernel,
    require_gpu,
    use_device,
)
from freescale.kernels.row_sums.reference import SortedRows, check_values

SUMS, CHUNKS = RowLaunch(1024, 4), RowLaunch(2048, 4)
UNROLL = 4  # values of a row in flight
# values: rows with more are cut into chunks, so that no program adds up a hot row alone; a power
# of two, and so a multiple of a tile's rows
CHUNK = 128
BLOCK = 1024
# Sums of ranks: what torch adds without a wider type in between.
DTYPES = (torch.float32, torch.float64)


def spread_ids(ids: Tensor, out: Tensor, stride: int, rows: int, base: int) -> None:
    """out [n] = ids [n] * stride % rows + base: where the ids of a table are in its storage."""
    require_gpu(ids.device, "embedding.layout")
    if ids.numel():
        from freescale.kernels.row_sums.triton_kernels import spread_kernel

        with use_device(ids.device):
            grid = (count_blocks(ids.numel(), BLOCK),)
            numbers = (stride, rows, base)
            launch_kernel(
                spread_kernel, grid, ids.contiguous(), out, ids.numel(), *numbers, BLOCK=BLOCK
            )


def sum_by_row(values: Tensor, rows: Tensor, count: int, onto: Tensor | None = None) -> Tensor:
    """values [n, width] of rows [n] -> [count, width]: the sum of each row's values, added to those
    of `onto` [count, width], which is overwritten; without it zero where there are none."""
    check_values(values, rows)
    require_gpu(values.device, "kernels.row_sums.reference")
    out = onto
    if out is None:
        out = torch.zeros(count, values.shape[1], dtype=values.dtype, device=values.device)
    rows_sorted = SortedRows.of(rows)
    _launch_sums(rows_sorted, values.contiguous(), out, rows, dense=True, adds=onto is not None)
    return out


def sum_sorted(rows: SortedRows, values: Tensor) -> tuple[Tensor, Tensor]:
    """values [n, width] of rows that were sorted since -> (row numbers [n], sums [n, width]), by
    sorted position: where a row begins, that row and its sum; elsewhere -1, and no sum."""
    check_values(values, rows.order)
    require_gpu(values.device, "kernels.row_sums.reference")
    found, out = torch.empty_like(rows.rows), torch.empty_like(values)
    _launch_sums(rows, values.contiguous(), out, found, dense=False)
    return found, out


def _launch_sums(
    rows: SortedRows, values: Tensor, out: Tensor, found: Tensor, *, dense: bool, adds: bool = False
) -> None:
    if not values.numel():
        return
    from freescale.kernels.row_sums.triton_kernels import row_sums_kernel

    shape = shape_sums(SUMS, values.shape[1])
    n = values.shape[0]
    with use_device(values.device):
        partial = sum_chunks(rows, values)
        grid = (count_blocks(n, shape["R"]),)
        tensors = (values, rows.rows, rows.order, partial, out, found)
        launch_kernel(row_sums_kernel, grid, *tensors, n, DENSE=dense, ADDS=adds, **shape)


def sum_chunks(rows: SortedRows, values: Tensor) -> Tensor:
    """The sums of the chunks of long rows, where `sum_rows` looks for them."""
    n, width = values.shape
    if n <= CHUNK:
        return values  # no row is long
    from freescale.kernels.row_sums.triton_kernels import chunk_sums_kernel

    windows = count_blocks(n, CHUNK)
    partial = torch.empty(2 * windows, width, dtype=torch.float32, device=values.device)
    shape = CHUNKS.shape(width)
    shape["R"] = min(shape["R"], CHUNK)
    tensors, sizes = (values, rows.rows, rows.order, partial), (n, n.bit_length())
    launch_kernel(chunk_sums_kernel, (2 * windows,), *tensors, *sizes, CHUNK=CHUNK, **shape)
    return partial


def shape_sums(launch: RowLaunch, width: int) -> dict[str, int]:
    """Arguments of a launch that sums rows of this width."""
    shape = launch.shape(width)
    # Triton 3.6 does not compile such sums for 8, 32 and 64 rows a program
    if 16 < shape["R"] < 128:
        shape["R"] = 16
    elif shape["R"] == 8:
        shape["R"] = 4
    shape["R"] = min(shape["R"], CHUNK)
    return shape | {"CHUNK": CHUNK, "STEPS": CHUNK.bit_length(), "UNROLL": UNROLL}


def sum_in_order(parts: Tensor, copies: int) -> Tensor:
    """As `reference.rank_sums.sum_in_order`."""
    from freescale.kernels.row_sums.triton_kernels import sum_in_order_kernel

    require_gpu(parts.device, "kernels.row_sums.reference")
    assert parts.dtype in DTYPES and parts.is_contiguous()
    ranks, count = parts.shape
    total = torch.empty(copies * count, dtype=parts.dtype, device=parts.device)
    if total.numel():
        with use_device(parts.device):
            launch_kernel(
                sum_in_order_kernel, (count_blocks(count, BLOCK),), parts, total, count, ranks,
                copies, BLOCK=BLOCK,
            )  # fmt: skip
    return total
