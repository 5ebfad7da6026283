"""`variable`: samples sorted by length, cut into one segment of equal weight per rank."""

from __future__ import annotations

import numpy as np

from freescale.balance.partitioners.common import descending
from freescale.balance.problem import Problem


class Variable:
    """The paper's VBS: samples sorted by length, weights L^alpha, cut into contiguous segments of
    equal weight, one per rank.

    The auto-tuner moves the cuts by measured times: where a problem brings them, ranks that took
    longer than the mean get a smaller share from then on. A measurement is two batches old when it
    is used, hence the small gain.
    """

    __name__ = "variable"

    def __init__(self, alpha: float = 1.5, gain: float = 0.25) -> None:
        self.alpha, self.gain = alpha, gain
        self.shares: np.ndarray | None = None  # [ranks], of the total weight; their mean is 1

    def __call__(self, problem: Problem) -> np.ndarray:
        if problem.times is not None:
            self._tune(problem.times)
        order = descending(problem.tokens.astype(np.float64))
        weights = problem.tokens[order].astype(np.float64) ** self.alpha
        shares = self._shares(problem.ranks)
        cuts = np.cumsum(shares)[:-1] / np.sum(shares) * weights.sum()
        # a sample belongs to the segment that its middle lies in
        middle = np.cumsum(weights) - weights / 2
        rank_of = np.empty(len(order), np.int64)
        rank_of[order] = np.searchsorted(cuts, middle, side="right")
        return rank_of

    def _shares(self, ranks: int) -> np.ndarray:
        return (
            self.shares if self.shares is not None and len(self.shares) == ranks else np.ones(ranks)
        )

    def _tune(self, times: np.ndarray) -> None:
        """times [ranks] of a step, the same on every rank; 0 where nothing was measured, and then
        nothing is moved."""
        times = np.asarray(times, np.float64)
        if not np.isfinite(times).all() or (times < 0).any():
            raise ValueError(
                f"variable: step times must be finite and not negative, got {times.tolist()}"
            )
        if (times == 0).any():
            return
        moved = self._shares(len(times)) * (1 - self.gain * (times / times.mean() - 1).clip(-1, 1))
        self.shares = moved / moved.sum() * len(times)

    def state_dict(self) -> dict:
        return {"shares": None if self.shares is None else self.shares.tolist()}

    def load_state_dict(self, state: dict) -> None:
        self.shares = None if state["shares"] is None else np.array(state["shares"])


def variable(problem: Problem) -> np.ndarray:
    """`Variable` before any tuning."""
    return Variable()(problem)
