"""How many entries of each gradient a step may send, and which are large enough. Pure functions;
nothing here communicates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SMALL = 1024  # tensors with fewer entries are summed whole: indices would cost more than they save
# whole tensors take at most this fraction of the budget, so that large ones need not wait
_WHOLE_SHARE = 10


def check_share(eta: float) -> None:
    if not 0 <= eta < 1:
        raise ValueError(
            "eta, the share of entries that is held back, must be at least 0 and "
            f"below 1, got {eta}: 0.99 sends 1 %"
        )


def check_period(every: int) -> None:
    if every < 1:
        raise ValueError(f"thresholds are reset every N steps: N must be at least 1, got {every}")


def compute_budget(entries: int, eta: float) -> int:
    """How many entries a step may send: a share of 1 - eta, rounded down."""
    check_share(eta)
    return math.floor(round((1 - eta) * entries, 6))  # 0.1 of 2,000 is 200, not 199.99999999999997


def compute_remaining_budget(sizes: Sequence[int], eta: float) -> int:
    """Budget of the thresholded tensors. If whole ones would take over a tenth of it, the model is
    small, and the others have their own budget."""
    whole = sum(size for size in sizes if size < SMALL)
    allowed = compute_budget(sum(sizes), eta)
    if _WHOLE_SHARE * whole <= allowed:
        return allowed - whole
    return compute_budget(sum(sizes) - whole, eta)


def distribute_budget(sizes: Sequence[int], allowed: int) -> list[int]:
    """Entries that each tensor may send: one, so that none starves, and a share of the rest by
    size. Their sum is at most `allowed`, or the number of tensors."""
    left, entries = max(0, allowed - len(sizes)), sum(sizes) - len(sizes)
    return [1 + left * (size - 1) // max(1, entries) for size in sizes]


def get_smallest_threshold(dtype: torch.dtype) -> float:
    """The least threshold: zeros are never sent."""
    return torch.finfo(dtype).tiny


def compute_threshold(magnitudes: Tensor, most: int) -> Tensor:
    """magnitudes [n] -> [1]: what the `most` largest reach."""
    entries = magnitudes.numel()
    least = get_smallest_threshold(magnitudes.dtype)
    if most == entries:  # send all, not only those above this step's smallest
        return magnitudes.new_full((1,), least)
    return magnitudes.kthvalue(entries - most + 1, keepdim=True).values.clamp(min=least)


def select_largest(magnitudes: Tensor, threshold: Tensor, most: int) -> Tensor:
    """Positions [sent] int64, ascending, of magnitudes [n] that reach the threshold.

    If more than `most` do, only the largest, and of equal ones the first: errors grow, and an old
    threshold would let ever more through. NaN is always sent: kept in the error it would stay
    unseen, while the exact step shows it at once.
    """
    found = (magnitudes < threshold).logical_not_().nonzero().view(-1)
    if found.numel() <= most:
        return found
    reached = magnitudes[found]
    # NaN if `most` or more are
    least = reached.kthvalue(found.numel() - most + 1).values
    sure = (reached > least) | reached.isnan()
    equal = reached == least
    return found[sure | (equal & (equal.cumsum(0) <= most - sure.sum()))]
