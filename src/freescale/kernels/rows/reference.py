"""Rows of a table in plain torch: gather, sum of duplicates, exchange."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def gather_rows(weight: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """weight [n, width], rows [r] -> [r, width], in another dtype if one is given."""
    return weight.index_select(0, rows).to(dtype or weight.dtype)


def group_duplicates(rows: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A function that sums gradients [r, width] of equal rows [r], in order of appearance -> sorted
    unique rows [u], sums [u, width]. Deterministic, and independent of the other rows of the call:
    on the CPU index_add_ adds source rows one after another; on CUDA, where it would use atomics,
    each segment is summed on its own."""
    if rows.device.type == "cuda":
        ordered, order = rows.sort(stable=True)
        unique, counts = torch.unique_consecutive(ordered, return_counts=True)
        sums = partial(torch.segment_reduce, reduce="sum", lengths=counts, axis=0, unsafe=True)
        return lambda gradients: (unique, sums(gradients.index_select(0, order)))
    unique, inverse = torch.unique(rows, return_inverse=True)
    if unique.numel() == rows.numel():
        # Without duplicates, a permutation gives the same bits for half the traffic.
        order = torch.empty_like(inverse)
        order[inverse] = torch.arange(inverse.numel(), device=rows.device)
        return lambda gradients: (unique, gradients.index_select(0, order))

    def sum_gradients(gradients: Tensor) -> tuple[Tensor, Tensor]:
        # Adding to negative zero changes no bit, not even the sign of a zero.
        start = gradients.new_full((unique.numel(), gradients.shape[1]), -0.0)
        return unique, start.index_add_(0, inverse, gradients)

    return sum_gradients


def swap_rows(table: Tensor, slots: Tensor, kept: Tensor) -> None:
    """Exchanges distinct slots [m] of table [n, ...] with the rows `kept` [m or more, ...]."""
    kept = kept[: slots.numel()]
    before = table.index_select(0, slots)
    table.index_copy_(0, slots, kept)
    kept.copy_(before)
