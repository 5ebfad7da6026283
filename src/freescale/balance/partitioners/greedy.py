"""`greedy`, the default, and `greedy_equal`, which keeps counts equal."""

from __future__ import annotations

import heapq

import numpy as np

from freescale.balance.partitioners.common import (
    explain_no_room,
    find_room,
    sort_descending,
    trade_samples,
)
from freescale.balance.problem import Problem


def greedy(problem: Problem) -> np.ndarray:
    """Places the most expensive sample first, on the least loaded rank; then trades samples.

    Counts are free; the cap is kept. The default: closest to the lower bound. Raises ValueError if
    a sample fits on no rank under the cap.
    """
    rank_of = place_longest_first(problem)
    trade_samples(problem, rank_of)
    return rank_of


def greedy_equal(problem: Problem) -> np.ndarray:
    """Places one sample per rank and round, the most expensive of a round on the least loaded rank.

    Counts differ by at most one. Ignores the cap.
    """
    order = sort_descending(problem.costs)
    loads = np.zeros(problem.ranks)
    rank_of = np.empty(len(order), np.int64)
    for start in range(0, len(order), problem.ranks):
        block = order[start : start + problem.ranks]
        ranks = np.argsort(loads, kind="stable")[: len(block)]
        rank_of[block] = ranks
        loads[ranks] += problem.costs[block]
    return rank_of


_FEW = 256  # samples: up to here a loop over samples is faster than array operations


def place_longest_first(problem: Problem) -> np.ndarray:
    """Longest processing time first: each sample to the least loaded rank with room. rank_of
    [n]."""
    if len(problem.costs) <= _FEW:
        return _place_one_at_a_time(problem)
    return _place_many_at_a_time(problem)


def _place_one_at_a_time(problem: Problem) -> np.ndarray:
    order = sort_descending(problem.costs)
    costs, tokens = problem.costs.tolist(), problem.tokens.tolist()
    cap = problem.cap
    heap = [(0.0, rank, 0) for rank in range(problem.ranks)]  # load, rank, tokens held
    rank_of = np.empty(len(order), np.int64)
    for sample in order.tolist():
        full = []
        while cap is not None and heap and heap[0][2] + tokens[sample] > cap:
            full.append(heapq.heappop(heap))
        if not heap:
            raise explain_no_room(problem, sample, "greedy")
        load, rank, held = heap[0]
        rank_of[sample] = rank
        heapq.heapreplace(heap, (load + costs[sample], rank, held + tokens[sample]))
        for entry in full:
            heapq.heappush(heap, entry)
    return rank_of


def _place_many_at_a_time(problem: Problem) -> np.ndarray:
    """The same assignment by array operations.

    With ranks sorted by load l_0 <= l_1 <= ... and the next samples s_0 >= s_1 >= ..., sample j
    goes to rank j as long as rank j is still the least loaded, that is while l_j < min(l_i + s_i)
    over i < j. One round places all of those.
    """
    order = sort_descending(problem.costs)
    costs, tokens = problem.costs[order], problem.tokens[order]
    loads, held = np.zeros(problem.ranks), np.zeros(problem.ranks, np.int64)
    placed = np.empty(len(order), np.int64)
    start = 0
    while start < len(order):
        ranks = np.argsort(loads, kind="stable")
        size = min(problem.ranks, len(order) - start)
        ranks, block = ranks[:size], slice(start, start + size)
        before = loads[ranks]
        after = before + costs[block]
        stop = before[1:] >= np.minimum.accumulate(after)[:-1]
        count = int(stop.argmax()) + 1 if stop.any() else size
        if problem.cap is not None:
            over = held[ranks[:count]] + tokens[start : start + count] > problem.cap
            if over.any():
                count = int(over.argmax())
                if not count:
                    room = find_room(problem, int(order[start]), loads, held, "greedy")
                    count, ranks = 1, np.array([room])
        ranks, block = ranks[:count], slice(start, start + count)
        placed[block] = ranks
        loads[ranks] += costs[block]
        held[ranks] += tokens[block]
        start += count
    rank_of = np.empty(len(order), np.int64)
    rank_of[order] = placed
    return rank_of
