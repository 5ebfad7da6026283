"""`variable`: samples sorted by length, cut into one segment of equal weight per rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from freescale.balance.partitioners.common import sort_descending
from freescale.balance.problem import Problem


class Variable:
    """Sorts samples by length and cuts them into one contiguous segment per rank (the paper's VBS).

    A sample of length L weighs L^alpha; segments have equal weight at first. Where a problem has
    measured times, the auto-tuner moves the cuts: ranks that took longer than the mean get a
    smaller share from then on. Ignores the cap.

    Args:
        alpha: The exponent of the length.
        gain: How far one measurement moves the cuts. Small, because a measurement is two batches
            old when it is used.
    """

    __name__ = "variable"

    def __init__(self, alpha: float = 1.5, gain: float = 0.25) -> None:
        self.alpha, self.gain = alpha, gain
        self.shares: np.ndarray | None = None  # [ranks], of the total weight; their mean is 1

    def __call__(self, problem: Problem) -> np.ndarray:
        """Tokens [n], ranks and times [ranks] of the problem -> rank_of [n] int64."""
        if problem.times is not None:
            self._tune(problem.times)
        order = sort_descending(problem.tokens)
        weights = problem.tokens[order] ** self.alpha
        shares = self._shares(problem.ranks)
        cuts = np.cumsum(shares)[:-1] / np.sum(shares) * weights.sum()
        # A sample belongs to the segment that contains its middle.
        middle = np.cumsum(weights) - weights / 2
        rank_of = np.empty(len(order), np.int64)
        rank_of[order] = np.searchsorted(cuts, middle, side="right")
        return rank_of

    def _shares(self, ranks: int) -> np.ndarray:
        if self.shares is None or len(self.shares) != ranks:
            return np.ones(ranks)
        return self.shares

    def _tune(self, times: np.ndarray) -> None:
        """Moves the cuts by step times [ranks]; if any is 0 (not measured), they stay."""
        times = np.asarray(times, np.float64)
        if not np.isfinite(times).all() or (times < 0).any():
            raise ValueError(
                f"variable: step times must be finite and not negative, got {times.tolist()}"
            )
        if (times == 0).any():
            return
        moved = self._shares(len(times)) * (1 - self.gain * (times / times.mean() - 1).clip(max=1))
        self.shares = moved / moved.sum() * len(times)

    def state_dict(self) -> dict[str, Any]:
        return {"shares": None if self.shares is None else self.shares.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shares = None if state["shares"] is None else np.array(state["shares"])


def variable(problem: Problem) -> np.ndarray:
    """`Variable` without tuning: rank_of [n] int64."""
    return Variable()(problem)
