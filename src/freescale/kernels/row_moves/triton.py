"""Rows that move on a GPU: exchanged in one pass, and copied by their numbers.

Exchange: a row is read, kept, and overwritten by the initial row of an id, by zeros, or by a row
that was kept before. Initial rows are those of `embedding.storage.draw_initial_rows`, up to the
last bits of a logarithm and a cosine. In plain torch each of its twenty operations writes all
entries in 64 bits; for the new ids of a batch that is more than the batch reads.

Copies: one of both tables may be in pinned host memory. The GPU reads and writes it itself; neither
a host core nor a staging buffer takes part.
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

EXCHANGE = RowLaunch(1024, 4)


def insert_drawn(
    table: Tensor,
    slots: Tensor,
    ids: Tensor,
    seed: Tensor,
    std: float,
    *,
    state: Tensor | None = None,
    room: int | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Writes the initial rows of ids [m] to different slots [m] of table [n, width] float32, and
    zeros to those of its state [n].

    Args:
        seed: [1], of the table, on the same device.
        room: of the first so many alone; by default of all.
        total: and of the first of so many, [1] or more int64: the host need not know it.

    Returns:
        what was there: rows [room, width], state [room].
    """
    room = slots.numel() if room is None else room
    before = table.new_empty(room, *table.shape[1:])
    zeroed = state.new_empty(room) if state is not None else None
    _exchange(table, slots, before, room, ids, seed, std, (state, zeroed), total, draws=True)
    return before, zeroed


def insert_zeros(
    table: Tensor, slots: Tensor, room: int | None = None, total: Tensor | None = None
) -> Tensor:
    """Writes zeros to different slots [m] of table [n, ...]; of `room` and `total`, as above.
    Returns what was there, [room, ...]."""
    room = slots.numel() if room is None else room
    before = table.new_empty(room, *table.shape[1:])
    _exchange(table, slots, before, room, total=total)
    return before


def swap_rows(table: Tensor, slots: Tensor, kept: Tensor) -> None:
    """Exchanges different slots [m] of table [n, ...] with what was kept, [m or more, ...]."""
    _exchange(table, slots, kept, slots.numel(), swaps=True)


def _exchange(
    table: Tensor, slots: Tensor, kept: Tensor, count: int, ids: Tensor | None = None,
    seed: Tensor | None = None, std: float = 0.0,
    state: tuple[Tensor | None, Tensor | None] = (None, None), total: Tensor | None = None,
    draws: bool = False, swaps: bool = False,
) -> None:  # fmt: skip
    require_gpu(table.device, "kernels.row_moves.reference")
    assert table.is_contiguous() and kept.is_contiguous() and slots.dtype == torch.int64
    if not count or not kept.numel():
        return
    from freescale.kernels.row_moves.triton_kernels import exchange_kernel

    shape = EXCHANGE.shape(kept.numel() // kept.shape[0])
    with use_device(table.device):
        launch_kernel(
            exchange_kernel, (count_blocks(count, shape["R"]),), table, slots, kept, ids, seed,
            *state, total, count, std, DRAWS=draws, SWAPS=swaps, **shape,
        )  # fmt: skip


COPY = RowLaunch(8192, 16)
# While a program waits for the bus, kernels that need all registers of a multiprocessor wait for
# the program: few of them, each with as many bytes on their way as it can hold.
PROGRAMS = 16


def copy_rows(to: Tensor, to_rows: Tensor, source: Tensor, rows: Tensor) -> None:
    """to[to_rows] = source[rows], for row numbers [n] int64 on the GPU. No row of `to` comes
    twice."""
    require_gpu(rows.device, "kernels.row_moves.native")
    assert to.is_contiguous() and source.is_contiguous() and to.dtype == source.dtype
    assert to_rows.dtype == rows.dtype == torch.int64 and to.shape[1:] == source.shape[1:]
    width = torch.Size(to.shape[1:]).numel()
    if not rows.numel() or not width:
        return
    from freescale.kernels.row_moves.triton_kernels import copy_rows_kernel

    shape = COPY.shape(width)
    programs = min(PROGRAMS, count_blocks(rows.numel(), shape["R"]))
    with use_device(rows.device):
        launch_kernel(
            copy_rows_kernel, (programs,), to, to_rows, source, rows, rows.numel(), **shape
        )
