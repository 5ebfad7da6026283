"""Partitioners: pure functions from gathered samples to the rank of each. No process group; the
same on every rank.

A partitioner takes a `Problem` and returns the rank of each sample [n]. Samples are numbered in the
order of the global batch; all ties are broken by that number, and between ranks by the rank's.
`assign` runs one (or any function of the same signature), checks what came back and says how good
it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Problem:
    """Everything that a partitioner may look at: gathered from all ranks, so that all ranks decide
    alike."""

    costs: np.ndarray  # [n] float64, predicted
    tokens: np.ndarray  # [n] int64
    home: np.ndarray  # [n] int64: the rank that holds the sample now
    ranks: int
    cap: int | None = None  # tokens that a rank may hold at most
    nodes: np.ndarray | None = None  # [ranks]: the machine of each rank; None: all in one
    # [ranks]: measured seconds of a recent step; only where assignments may depend on them
    times: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"there must be at least one rank, got {self.ranks}")
        n = len(self.costs)
        if len(self.tokens) != n or len(self.home) != n:
            raise ValueError(
                f"{n} costs, {len(self.tokens)} token counts and {len(self.home)} "
                "homes: they must be equally many"
            )
        bad = np.flatnonzero(~np.isfinite(self.costs) | (self.costs < 0))
        if bad.size:
            raise ValueError(
                f"sample {bad[0]} has cost {self.costs[bad[0]]}: costs must be "
                "finite and not negative"
            )
        outside = np.flatnonzero((self.home < 0) | (self.home >= self.ranks))
        if outside.size:
            raise ValueError(
                f"sample {outside[0]} is at rank {self.home[outside[0]]} of {self.ranks}"
            )
        if self.cap is not None and n:
            largest, total = int(self.tokens.max()), int(self.tokens.sum())
            if largest > self.cap:
                raise ValueError(
                    f"sample {int(self.tokens.argmax())} has {largest} tokens, over "
                    f"the cap of {self.cap} per rank"
                )
            if total > self.cap * self.ranks:
                raise ValueError(
                    f"{total} tokens do not fit on {self.ranks} ranks under a cap of "
                    f"{self.cap} tokens each"
                )


@dataclass(frozen=True)
class Assignment:
    rank_of: np.ndarray  # [n] int64
    loads: np.ndarray  # [ranks] float64: predicted cost of each rank
    loads_before: np.ndarray  # [ranks] float64: the same, had every sample stayed where it was
    bound: float  # no assignment has a smaller maximum: max(mean load, largest sample)
    moved_tokens: int  # of samples that leave their rank
    partitioner: str

    @property
    def imbalance(self) -> float:
        """Largest load / mean load."""
        return float(self.loads.max() / self.loads.mean()) if self.loads.any() else 1.0

    @property
    def above_bound(self) -> float:
        """Largest load / bound - 1."""
        return float(self.loads.max() / self.bound - 1) if self.bound else 0.0

    @property
    def straggler_percent(self) -> float:
        """Predicted: mean over ranks of the wait for the slowest / its time."""
        return float(100 * (1 - self.loads.mean() / self.loads.max())) if self.loads.any() else 0.0


Partitioner = Callable[[Problem], np.ndarray]


def assign(problem: Problem, partitioner: Partitioner) -> Assignment:
    """Runs a partitioner and checks its result."""
    name = getattr(partitioner, "__name__", type(partitioner).__name__.lower())
    rank_of = np.asarray(partitioner(problem))
    n = len(problem.costs)
    if rank_of.shape != (n,) or rank_of.dtype.kind not in "iu":
        raise ValueError(
            f"partitioner {name!r} returned {rank_of.dtype} {rank_of.shape}; one whole number for "
            f"each of {n} samples is needed"
        )
    outside = np.flatnonzero((rank_of < 0) | (rank_of >= problem.ranks))
    if outside.size:
        raise ValueError(
            f"partitioner {name!r} gives sample {outside[0]} to rank "
            f"{rank_of[outside[0]]} of {problem.ranks}"
        )
    rank_of = rank_of.astype(np.int64)
    if problem.cap is not None and n:
        held = np.bincount(rank_of, problem.tokens, problem.ranks)
        if held.max() > problem.cap:
            over = int(held.argmax())
            raise ValueError(
                f"partitioner {name!r} gives rank {over} {int(held[over])} tokens, "
                f"over the cap of {problem.cap}"
            )
    loads = np.bincount(rank_of, problem.costs, problem.ranks)
    bound = (
        max(float(problem.costs.sum()) / problem.ranks, float(problem.costs.max())) if n else 0.0
    )
    moved = int(problem.tokens[rank_of != problem.home].sum())
    before = np.bincount(problem.home, problem.costs, problem.ranks)
    return Assignment(rank_of, loads, before, bound, moved, name)


def stay(problem: Problem) -> np.ndarray:
    """`none`: every sample where it is."""
    return problem.home


def fixed(problem: Problem) -> np.ndarray:
    """Sorted by cost, dealt zig-zag (the paper's FBS): rank i of n gets sorted positions i, 2n-1-i,
    2n+i, ... Counts differ by one at most. Knows no cap."""
    order = descending(problem.costs)
    place = np.arange(len(order)) % (2 * problem.ranks)
    rank_of = np.empty(len(order), np.int64)
    rank_of[order] = np.minimum(place, 2 * problem.ranks - 1 - place)
    return rank_of


def greedy(problem: Problem) -> np.ndarray:
    """The recommended one: most expensive first onto the least loaded rank, counts free, under the
    cap; then the fullest rank trades with the emptiest while that helps."""
    rank_of = longest_first(problem)
    trade(problem, rank_of)
    return rank_of


def greedy_equal(problem: Problem) -> np.ndarray:
    """Most expensive first, a round of one sample per rank at a time: the most expensive of a round
    to the least loaded rank. Counts differ by one at most. Knows no cap."""
    order = descending(problem.costs)
    loads = np.zeros(problem.ranks)
    rank_of = np.empty(len(order), np.int64)
    for start in range(0, len(order), problem.ranks):
        block = order[start : start + problem.ranks]
        ranks = np.argsort(loads, kind="stable")[: len(block)]
        rank_of[block] = ranks
        loads[ranks] += problem.costs[block]
    return rank_of


def descending(costs: np.ndarray) -> np.ndarray:
    """Indices by falling cost; equal costs in the order of the batch."""
    return np.argsort(-costs, kind="stable")


_NO_ROOM = (
    "greedy: sample {sample} with {tokens} tokens fits on no rank under the cap of {cap}: "
    "raise the cap by a tenth"
)
_FEW = 256  # samples: below, one at a time is quicker than rounds of array operations


def longest_first(problem: Problem) -> np.ndarray:
    """Longest-processing-time-first: the most expensive sample onto the least loaded rank that has
    room."""
    return _one_at_a_time(problem) if len(problem.costs) <= _FEW else _many_at_a_time(problem)


def _one_at_a_time(problem: Problem) -> np.ndarray:
    order = descending(problem.costs)
    costs, tokens = problem.costs.tolist(), problem.tokens.tolist()
    cap = problem.cap
    heap = [(0.0, rank, 0) for rank in range(problem.ranks)]  # load, rank, tokens held
    rank_of = np.empty(len(order), np.int64)
    for sample in order.tolist():
        full = []
        while cap is not None and heap and heap[0][2] + tokens[sample] > cap:
            full.append(heapq.heappop(heap))
        if not heap:
            raise ValueError(_NO_ROOM.format(sample=sample, tokens=tokens[sample], cap=cap))
        load, rank, held = heap[0]
        rank_of[sample] = rank
        heapq.heapreplace(heap, (load + costs[sample], rank, held + tokens[sample]))
        for entry in full:
            heapq.heappush(heap, entry)
    return rank_of


def _many_at_a_time(problem: Problem) -> np.ndarray:
    """The same assignment by array operations.

    With ranks sorted by load l_0 <= l_1 <= ... and the next samples s_0 >= s_1 >= ..., sample j
    goes to rank j as long as rank j is still the least loaded, that is while l_j <= min(l_i + s_i)
    over i < j. One round places all of those.
    """
    order = descending(problem.costs)
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
        stop = before[1:] > np.minimum.accumulate(after)[:-1]
        count = int(stop.argmax()) + 1 if stop.any() else size
        if problem.cap is not None:
            over = held[ranks[:count]] + tokens[start : start + count] > problem.cap
            if over.any():
                count = int(over.argmax())
                if not count:
                    count, ranks = (
                        1,
                        np.array(
                            [
                                _least_loaded_with_room(
                                    loads, held, int(tokens[start]), problem, int(order[start])
                                )
                            ]
                        ),
                    )
        ranks, block = ranks[:count], slice(start, start + count)
        placed[block] = ranks
        loads[ranks] += costs[block]
        held[ranks] += tokens[block]
        start += count
    rank_of = np.empty(len(order), np.int64)
    rank_of[order] = placed
    return rank_of


def _least_loaded_with_room(
    loads: np.ndarray, held: np.ndarray, tokens: int, problem: Problem, sample: int
) -> int:
    assert problem.cap is not None
    room = np.flatnonzero(held + tokens <= problem.cap)
    if not room.size:
        raise ValueError(_NO_ROOM.format(sample=sample, tokens=tokens, cap=problem.cap))
    return int(room[loads[room].argmin()])


_TRADES = 4  # attempts per rank


def trade(problem: Problem, rank_of: np.ndarray, goal: float | None = None) -> None:
    """Improves `rank_of` in place: the fullest rank gives a sample to the emptiest, or swaps one,
    whichever brings the pair closest to even. Ends under `goal` (default: the bound), or when that
    no longer lowers the maximum."""
    ranks, costs, tokens = problem.ranks, problem.costs, problem.tokens
    if ranks < 2 or not len(costs):
        return
    loads, held = np.bincount(rank_of, costs, ranks), np.bincount(rank_of, tokens, ranks)
    cap = np.inf if problem.cap is None else problem.cap
    goal = max(loads.mean(), costs.max()) * 1.0005 if goal is None else goal
    for _ in range(_TRADES * ranks):
        full, empty = int(loads.argmax()), int(loads.argmin())
        if loads[full] <= goal:
            return
        gap = loads[full] - loads[empty]
        mine, theirs = np.flatnonzero(rank_of == full), np.flatnonzero(rank_of == empty)
        # Giving i and taking j (or nothing: the last column) changes both loads by costs[i] -
        # costs[j]; best is half the gap.
        shift = costs[mine][:, None] - np.append(costs[theirs], 0.0)[None, :]
        extra = tokens[mine][:, None] - np.append(tokens[theirs], 0)[None, :]
        allowed = (
            (shift > 0) & (shift < gap) & (held[empty] + extra <= cap) & (held[full] - extra <= cap)
        )
        if not allowed.any():
            return
        best = int(np.where(allowed, np.abs(shift - gap / 2), np.inf).argmin())
        i, j = divmod(best, shift.shape[1])
        rank_of[mine[i]] = empty
        if j < len(theirs):
            rank_of[theirs[j]] = full
        loads[full] -= shift[i, j]
        loads[empty] += shift[i, j]
        held[full] -= extra[i, j]
        held[empty] += extra[i, j]
