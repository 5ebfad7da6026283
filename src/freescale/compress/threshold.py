"""Which entries of a gradient are large enough to be sent. Pure functions of one tensor; nothing here communicates."""

from __future__ import annotations

import torch
from torch import Tensor


def check_share(eta: float) -> None:
    if not 0 <= eta < 1:
        raise ValueError(f"eta, the share of entries that is held back, must be at least 0 and below 1, got {eta}: 0.99 sends 1 %")


def check_period(every: int) -> None:
    if every < 1:
        raise ValueError(f"thresholds are reset every so many steps: at least 1, got {every}")


def entries_kept(entries: int, eta: float) -> int:
    """How many of so many entries are at or above the threshold: a share of 1 - eta, at least one."""
    check_share(eta)
    return min(entries, max(1, round((1 - eta) * entries)))


def smallest(dtype: torch.dtype) -> float:
    """The least threshold: zeros are never worth sending."""
    return torch.finfo(dtype).tiny


def threshold_of(magnitudes: Tensor, eta: float) -> Tensor:
    """magnitudes [n] -> [1]: what a share of 1 - eta of them reaches."""
    entries = magnitudes.numel()
    kept = entries_kept(entries, eta)
    least = smallest(magnitudes.dtype)
    if kept == entries:  # all are sent, not only those that reach the smallest of this step
        return magnitudes.new_full((1,), least)
    return magnitudes.kthvalue(entries - kept + 1, keepdim=True).values.clamp(min=least)


def above(magnitudes: Tensor, threshold: Tensor, most: int) -> Tensor:
    """Positions [sent] int64, ascending, of magnitudes [n] that reach the threshold; where more than `most` do, of the largest
    (and what equals the least of them): errors grow, and an old threshold would let ever more through. What is not a number goes
    first: it would stay unseen in the error for ever, where the exact step shows it at once."""
    found = (magnitudes < threshold).logical_not_().nonzero().view(-1)
    if found.numel() <= most:
        return found
    reached = magnitudes[found]
    least = reached.kthvalue(found.numel() - most + 1).values
    return found[(reached < least).logical_not_()]
