"""`local`: moves few samples. Only overloaded ranks give some away, to their own node if it has
room."""

from __future__ import annotations

import numpy as np

from freescale.balance.partitioners.common import find_room, trade_samples
from freescale.balance.problem import Problem

_TOLERANCE = 0.004  # how far above the lower bound a load may stay


def local(problem: Problem) -> np.ndarray:
    """Moves samples only from overloaded ranks, within a node if possible.

    Every rank above the goal gives away its most expensive samples (most relief per token moved)
    until it is below. A sample goes to the least loaded rank of its node if that stays below the
    goal, otherwise to the least loaded of all. Trades follow. Counts are free; the cap is kept.
    Raises ValueError if a sample fits on no rank under it.
    """
    rank_of = problem.home.copy()
    if not len(rank_of):
        return rank_of
    loads = np.bincount(rank_of, problem.costs, problem.ranks)
    held = np.bincount(rank_of, problem.tokens, problem.ranks)
    goal = max(loads.mean(), problem.costs.max()) * (1 + _TOLERANCE)
    cap = np.inf if problem.cap is None else problem.cap
    given = _choose_samples_to_give(problem, loads, held, goal, cap)
    np.subtract.at(loads, problem.home[given], problem.costs[given])
    np.subtract.at(held, problem.home[given], problem.tokens[given])
    one_node = np.zeros(problem.ranks, np.int64)
    nodes = one_node if problem.nodes is None else np.asarray(problem.nodes)
    neighbours = {int(node): np.flatnonzero(nodes == node) for node in np.unique(nodes)}
    for sample in given[np.lexsort((given, -problem.costs[given]))]:
        cost, tokens = problem.costs[sample], problem.tokens[sample]
        near = neighbours[int(nodes[problem.home[sample]])]
        taker = near[loads[near].argmin()]
        if loads[taker] + cost > goal or held[taker] + tokens > cap:
            taker = find_room(problem, sample, loads, held, "local")
        rank_of[sample] = taker
        loads[taker] += cost
        held[taker] += tokens
    trade_samples(problem, rank_of, goal)
    return rank_of


def _choose_samples_to_give(
    problem: Problem, loads: np.ndarray, held: np.ndarray, goal: float, cap: float
) -> np.ndarray:
    """Samples [k] that overloaded ranks give away: the most expensive that fit into the excess,
    then the cheapest that covers the remainder."""
    # Rank by rank, by falling cost; equal costs keep the order of the batch.
    order = np.lexsort((-problem.costs, problem.home))
    ends = np.cumsum(np.bincount(problem.home))
    given: list[int] = []
    for rank in np.flatnonzero((loads > goal) | (held > cap)):
        mine = order[ends[rank - 1] if rank else 0 : ends[rank]]
        excess, surplus = loads[rank] - goal, held[rank] - cap
        kept: list[int] = []
        for sample in mine:
            if 0 < problem.costs[sample] <= excess or surplus > 0:
                given.append(int(sample))
                excess -= problem.costs[sample]
                surplus -= problem.tokens[sample]
            elif problem.costs[sample] > 0:
                kept.append(int(sample))
        if excess > 0:
            given.append(kept[-1])  # the cheapest: each costs more than the excess
    return np.array(given, np.int64)
