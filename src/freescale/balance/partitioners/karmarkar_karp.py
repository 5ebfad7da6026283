"""`karmarkar_karp`: the largest differencing method, for comparison."""

from __future__ import annotations

import numpy as np

from freescale.balance.partitioners.common import sort_descending
from freescale.balance.problem import Problem


def karmarkar_karp(problem: Problem) -> np.ndarray:
    """Largest differencing with equal counts.

    Starts from blocks of one sample per rank and joins the two blocks of largest spread, largest
    sums against smallest, until one is left. Counts differ by at most one. Ignores the cap.
    """
    ranks, n = problem.ranks, len(problem.costs)
    if not n:
        return np.zeros(0, np.int64)
    order = sort_descending(problem.costs)
    padded = np.full(-(-n // ranks) * ranks, -1, np.int64)  # -1: no sample
    padded[:n] = order
    costs = np.append(problem.costs, 0.0)
    sums = costs[padded].reshape(-1, ranks)  # [blocks, ranks], each falling
    # per block: rows of samples, a column per rank
    members = [[row] for row in padded.reshape(-1, ranks)]
    alive = list(range(len(sums)))
    while len(alive) > 1:
        spread = sums[alive].max(axis=1) - sums[alive].min(axis=1)
        first, second = (alive[i] for i in np.argsort(-spread, kind="stable")[:2])
        joined = sums[first] + sums[second][::-1]
        again = np.argsort(-joined, kind="stable")
        members[first] = [row[again] for row in members[first]] + [
            row[::-1][again] for row in members[second]
        ]
        sums[first] = joined[again]
        alive.remove(second)
    rank_of = np.empty(n + 1, np.int64)
    for row in members[alive[0]]:
        rank_of[row] = np.arange(ranks)
    return rank_of[:n]
