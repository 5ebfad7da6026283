"""Partitioners of the literature, for those who know them and for comparison: `variable` and `karmarkar_karp`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from freescale.balance.partition import Problem, descending


@dataclass
class Variable:
    """The paper's VBS: samples sorted by length, weights L^alpha, cut into contiguous segments of equal weight, one per rank.

    The auto-tuner moves the cuts by the measured times: `tune` takes the times of the last step, gathered from all ranks, and
    lowers the share of ranks that took longer than the mean. `shares` is its state.
    """

    alpha: float = 1.5
    gain: float = 0.5
    shares: np.ndarray | None = field(default=None)  # [ranks], of the total weight

    def __call__(self, problem: Problem) -> np.ndarray:
        order = descending(problem.tokens.astype(np.float64))
        weights = problem.tokens[order].astype(np.float64) ** self.alpha
        shares = self.shares if self.shares is not None and len(self.shares) == problem.ranks else np.ones(problem.ranks)
        cuts = np.cumsum(shares)[:-1] / np.sum(shares) * weights.sum()
        middle = np.cumsum(weights) - weights / 2  # a sample belongs to the segment that its middle lies in
        rank_of = np.empty(len(order), np.int64)
        rank_of[order] = np.searchsorted(cuts, middle, side="right")
        return rank_of

    def tune(self, times: np.ndarray) -> None:
        """times [ranks]: of the last step, the same on every rank."""
        times = np.asarray(times, np.float64)
        if not np.isfinite(times).all() or (times <= 0).any():
            raise ValueError(f"variable: step times must be positive, got {times.tolist()}")
        shares = self.shares if self.shares is not None and len(self.shares) == len(times) else np.ones(len(times))
        moved = shares * (1 - self.gain * (times / times.mean() - 1).clip(-1, 1))
        self.shares = moved / moved.sum() * len(times)


def variable(problem: Problem) -> np.ndarray:
    """`Variable` before any tuning."""
    return Variable()(problem)


def karmarkar_karp(problem: Problem) -> np.ndarray:
    """Largest differencing with equal counts: blocks of one sample per rank, the two with the largest spread combined, largest
    against smallest, until one is left. Knows no cap."""
    ranks, n = problem.ranks, len(problem.costs)
    if not n:
        return np.zeros(0, np.int64)
    order = descending(problem.costs)
    padded = np.full(-(-n // ranks) * ranks, -1, np.int64)  # -1: no sample
    padded[:n] = order
    costs = np.append(problem.costs, 0.0)
    sums = costs[padded].reshape(-1, ranks)  # [blocks, ranks], each falling
    members = [[row] for row in padded.reshape(-1, ranks)]  # per block: rows of samples, a column per rank
    alive = list(range(len(sums)))
    while len(alive) > 1:
        spread = sums[alive].max(axis=1) - sums[alive].min(axis=1)
        first, second = (alive[i] for i in np.argsort(-spread, kind="stable")[:2])
        joined = sums[first] + sums[second][::-1]
        again = np.argsort(-joined, kind="stable")
        members[first] = [row[again] for row in members[first]] + [row[::-1][again] for row in members[second]]
        sums[first] = joined[again]
        alive.remove(second)
    rank_of = np.empty(n + 1, np.int64)
    for row in members[alive[0]]:
        rank_of[row] = np.arange(ranks)
    return rank_of[:n]
