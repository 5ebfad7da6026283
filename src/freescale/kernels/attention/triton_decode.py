"""The attention of one new event for each of several users, over keys and values in memory of their
own, for NVIDIA GPUs. `models.incremental.layers` defines the result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freescale.kernels.jit.launch import (
    KernelModule,
    launch_kernel,
    require_gpu,
    round_up_to_power_of_two,
    use_device,
)
from freescale.packed import view_bytes
from freescale.visible import Visible

MAX_WIDTH, MAX_HEAD = 4096, 256  # widest values of all heads, widest head
PARTS = 32  # programs that share the keys of a head: one user with 8 heads keeps a GPU busy
BLOCK = 4096  # elements of the keys that a program loads at a time
SUM_WARPS, GATE_WARPS, COPY_WARPS = 4, 8, 4
_kernels = KernelModule("freescale.kernels.attention.triton_decode_kernels")


def attend(
    rows: Tensor,  # [users, u | v | q | k], before SiLU
    table: Tensor,  # [users, NewEventColumn and more] int64
    layer: int,
    widths: tuple[int, int],  # of a head's key and value
    norm: tuple[Tensor, Tensor, float],  # weight and bias [heads * d_v], eps
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    edges: Tensor | None,  # [buckets + 1] int64: the shortest time of each bucket
    max_length: int,
    visible: Visible | None = None,
) -> Tensor:
    """Writes the new keys and values, and returns the gated attention: [users, heads * d_v]."""
    require_gpu(rows.device, "models.incremental.layers")
    d_qk, d_v = widths
    users, heads = len(rows), rows.shape[1] // (2 * (d_qk + d_v))
    padded = round_up_to_power_of_two(d_qk), round_up_to_power_of_two(d_v)
    sums = rows.new_empty(users, PARTS, heads * d_v)
    out = rows.new_empty(users, heads * d_v)
    farthest = 0 if position_bias is None else len(position_bias) - 1
    buckets = 0 if time_bias is None else len(time_bias) - 1
    seen = (None, None) if visible is None else (visible.first, visible.last)
    with use_device(rows.device):
        launch_kernel(
            _kernels.sum_keys_kernel, (users * heads * PARTS,), rows, table, sums, layer,
            position_bias, farthest, time_bias, None if time_bias is None else edges, buckets,
            d_qk**-0.5, 1 / max_length, *seen, COLUMNS=table.shape[1], HEADS=heads, D_QK=d_qk,
            D_V=d_v, QK=padded[0], V=padded[1], N=max(16, BLOCK // max(padded)), PARTS=PARTS,
            num_warps=SUM_WARPS,
        )  # fmt: skip
        launch_kernel(
            _kernels.gate_kernel, (users,), sums, rows, *norm[:2], out, norm[2],
            WIDTH=heads * d_v, W=round_up_to_power_of_two(heads * d_v), ROW=rows.shape[1],
            PARTS=PARTS, num_warps=GATE_WARPS,
        )  # fmt: skip
    return out


def scatter(sources: Sequence[Tensor], table: Tensor, first: int) -> None:
    """Copies each user's rows of `sources` (each [users, ...], contiguous) to the addresses in the
    columns of the table from `first` on."""
    with use_device(table.device):
        for column, source in enumerate(sources, first):
            size = source[0].nbytes
            if size:
                launch_kernel(
                    _kernels.scatter_kernel, (len(table),), view_bytes(source), table, column,
                    COLUMNS=table.shape[1], SIZE=size, S=round_up_to_power_of_two(size),
                    num_warps=COPY_WARPS,
                )  # fmt: skip


def fits(width: int, widths: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether the kernels take values of this width over all heads, and heads of these widths."""
    return dtype == torch.float32 and width <= MAX_WIDTH and max(widths) <= MAX_HEAD
