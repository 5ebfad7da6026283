"""What several partitioners share."""

from __future__ import annotations

import numpy as np

from freescale.balance.problem import Problem


def sort_descending(costs: np.ndarray) -> np.ndarray:
    """costs [n] -> indices [n] by falling cost; equal costs keep the order of the batch."""
    return np.argsort(-costs, kind="stable")


def find_room(problem: Problem, sample: int, loads: np.ndarray, held: np.ndarray, name: str) -> int:
    """The least loaded rank that can hold a sample. ValueError from partitioner `name` if none."""
    cap = np.inf if problem.cap is None else problem.cap
    fits = held + problem.tokens[sample] <= cap
    if not fits.any():
        raise explain_no_room(problem, sample, name)
    return int(np.where(fits, loads, np.inf).argmin())


def explain_no_room(problem: Problem, sample: int, name: str) -> ValueError:
    return ValueError(
        f"{name}: sample {sample} with {problem.tokens[sample]} tokens fits on no rank under the "
        f"cap of {problem.cap}: raise the cap by a tenth"
    )


_TRADES = 4  # per rank, at most


def trade_samples(problem: Problem, rank_of: np.ndarray, goal: float | None = None) -> None:
    """Improves an assignment by trades between the most and the least loaded rank.

    A trade gives one sample, or swaps two, whichever brings the pair of ranks closest to even.

    Args:
        problem: The samples; no trade breaks its cap.
        rank_of: [n] rank of each sample, changed in place.
        goal: Stop when the largest load is at most this; default: 0.05 % above the lower bound.
            Trading also stops when no trade lowers the largest load.
    """
    ranks, costs, tokens = problem.ranks, problem.costs, problem.tokens
    if not len(costs):
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
        # Swapping i for j (or nothing: the last column) shifts costs[i] - costs[j]; half the gap is
        # best.
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
