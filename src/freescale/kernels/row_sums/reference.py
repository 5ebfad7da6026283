"""Sums of gradients by row, and of ranks' parts in their order, in plain torch: the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SortedRows:
    """Row numbers in ascending order, and the place that each had before."""

    rows: Tensor  # [n] int32 or int64; negative ones name no row
    order: Tensor  # [n] int64; equal rows in order of appearance

    @staticmethod
    def of(rows: Tensor) -> SortedRows:
        """rows [n], in any order. A sort of int32 takes half the passes of int64."""
        return SortedRows(*rows.sort(stable=True))


def sum_by_row(
    values: Tensor, rows: Tensor, count: int, onto: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """values [n, width] of rows [n] -> [count, width]: the sums of each row's values, in order, in
    another dtype if one is given; added to `onto` [count, width] if that is given. With rows [n,
    places], a value counts for several rows, and -1 is none."""
    check_values(values, rows)
    values = values if dtype is None else values.to(dtype)
    if rows.ndim > 1:
        values = values.repeat_interleave(rows.shape[1], 0)[rows.reshape(-1) >= 0]
        rows = rows[rows >= 0]
    sums = values.new_zeros(count, values.shape[1]).index_add_(0, rows, values)
    return sums if onto is None else onto.add_(sums)


def sum_sorted(
    rows: SortedRows, values: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """values [n, width], in the order before the sort -> (row numbers [u], sums [u, width])."""
    check_values(values, rows.order)
    unique, inverse = torch.unique_consecutive(rows.rows, return_inverse=True)
    values = values.index_select(0, rows.order)
    return unique, sum_by_row(values, inverse, unique.numel(), dtype=dtype)


def check_values(values: Tensor, rows: Tensor) -> None:
    if values.ndim != 2 or values.shape[0] != len(rows):
        raise ValueError(
            f"{len(rows)} rows need values [{len(rows)}, width], not {list(values.shape)}"
        )
    if values.device != rows.device:
        raise ValueError(f"tensors lie on different devices: {values.device}, {rows.device}")


def sum_in_order(parts: Tensor, copies: int) -> Tensor:
    """parts [ranks, n] -> [copies * n]: copies of ((part 0 + part 1) + part 2) + ..."""
    first, *others = parts.unbind(0)
    total = first.clone()
    for part in others:
        total += part
    return total.repeat(copies)
