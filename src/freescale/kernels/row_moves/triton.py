"""Rows that move on a GPU: exchanged in one pass, and copied by their numbers, one of the two
tables maybe in pinned host memory.

Exchange: a row is read, kept, and overwritten by the initial row of an id, by zeros, or by a row
that was kept before. Initial rows equal those of `embedding.storage.draw_initial_rows` up to the
last bits of a logarithm and a cosine; in plain torch each of twenty operations writes all entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.jit.launch import (
    KernelModule,
    RowLaunch,
    count_blocks,
    launch_blocks,
    require_gpu,
)

EXCHANGE, COPY = RowLaunch(1024, 4), RowLaunch(8192, 16)
# While a copy waits for the bus, kernels that need all registers of a multiprocessor wait for the
# copy. So there are few programs, each with as many bytes in flight as it can hold.
PROGRAMS = 16
_kernels = KernelModule("freescale.kernels.row_moves.triton_kernels")


def insert_drawn(
    table: Tensor, slots: Tensor, ids: Tensor, seed: Tensor, std: float, *,
    state: Tensor | None = None, room: int | None = None, total: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Writes the initial rows of ids [m], of a table with seed [1], to distinct slots [m] of table
    [n, width] float32, and zeros to those of its state [n]. Writes only the first `room` rows, and
    only the first total[0], int64, which the host need not know. Returns the previous rows [room,
    width] and state [room]."""
    room = slots.numel() if room is None else room
    before = table.new_empty(room, *table.shape[1:])
    zeroed = state.new_empty(room) if state is not None else None
    _exchange(table, slots, before, room, ids, seed, std, (state, zeroed), total, draws=True)
    return before, zeroed


def insert_zeros(
    table: Tensor, slots: Tensor, room: int | None = None, total: Tensor | None = None
) -> Tensor:
    """Writes zeros to distinct slots [m] of table [n, ...], as above. Returns the previous rows."""
    room = slots.numel() if room is None else room
    before = table.new_empty(room, *table.shape[1:])
    _exchange(table, slots, before, room, total=total)
    return before


def swap_rows(table: Tensor, slots: Tensor, kept: Tensor) -> None:
    _exchange(table, slots, kept, slots.numel(), swaps=True)


def _exchange(
    table: Tensor, slots: Tensor, kept: Tensor, count: int, ids: Tensor | None = None,
    seed: Tensor | None = None, std: float = 0.0,
    state: tuple[Tensor | None, Tensor | None] = (None, None), total: Tensor | None = None,
    draws: bool = False, swaps: bool = False,
) -> None:  # fmt: skip
    require_gpu(table.device, "kernels.rows.reference")
    assert table.is_contiguous() and kept.is_contiguous() and slots.dtype == torch.int64
    if kept.numel():
        shape = EXCHANGE.shape(kept.numel() // kept.shape[0])
        launch_blocks(
            _kernels.exchange_kernel, table.device, count, shape["R"], table, slots, kept, ids,
            seed, *state, total, count, std, DRAWS=draws, SWAPS=swaps, **shape,
        )  # fmt: skip


def copy_rows(to: Tensor, to_rows: Tensor, source: Tensor, rows: Tensor) -> None:
    """to[to_rows] = source[rows], [n] int64 on the GPU; the rows of `to` are distinct."""
    require_gpu(rows.device, "kernels.requests.native")
    assert to.is_contiguous() and source.is_contiguous() and to.dtype == source.dtype
    assert to_rows.dtype == rows.dtype == torch.int64 and to.shape[1:] == source.shape[1:]
    width = torch.Size(to.shape[1:]).numel()
    if width:
        shape = COPY.shape(width)
        programs = min(PROGRAMS, count_blocks(rows.numel(), shape["R"]))
        launch_blocks(
            _kernels.copy_rows_kernel, rows.device, programs, 1, to, to_rows, source, rows,
            rows.numel(), **shape,
        )  # fmt: skip
