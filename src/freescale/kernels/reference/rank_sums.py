"""Sums of what several ranks have sent, in the order of the ranks: the oracle. The version of a GPU
is in `triton.rank_sums`."""

from __future__ import annotations

from torch import Tensor


def sum_in_order(parts: Tensor, copies: int) -> Tensor:
    """parts [ranks, n] -> [copies * n]: ((part 0 + part 1) + part 2) + ..., so often."""
    first, *others = parts.unbind(0)
    total = first.clone()
    for part in others:
        total += part
    return total.repeat(copies)
