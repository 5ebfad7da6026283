"""The problem that a partitioner solves, and the checked solution.

A partitioner is a pure function from a `Problem` to the rank of each sample [n]: no process group,
and the same result on every rank. Samples are numbered in the order of the global batch; ties
between samples are broken by that number, ties between ranks by the rank. `assign` calls a
partitioner, checks its result and computes how good it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from freescale.balance.division import Division


@dataclass(frozen=True)
class Problem:
    """The samples of one global batch: all that a partitioner may depend on.

    The arrays are gathered from all ranks, so that all ranks decide the same.

    Raises:
        ValueError: If the arrays differ in length, a cost is negative or not finite, a rank is out
            of range, or the tokens cannot fit under the cap.
    """

    costs: np.ndarray  # [n] float64: predicted cost of each sample
    tokens: np.ndarray  # [n] int64
    home: np.ndarray  # [n] int64: the rank that holds the sample now
    ranks: int
    cap: int | None = None  # tokens that a rank may hold
    nodes: np.ndarray | None = None  # [ranks]: the node of each rank; None: all ranks in one node
    # [ranks]: measured seconds of a recent step; None unless assignments may depend on them
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
    """The rank of each sample, and how good that is."""

    rank_of: np.ndarray  # [n] int64
    loads: np.ndarray  # [ranks] float64: predicted cost of each rank
    loads_before: np.ndarray  # [ranks] float64: the same, had every sample stayed where it was
    bound: float  # no assignment has a smaller maximum: max(mean load, largest sample)
    moved_tokens: int  # tokens of samples that leave their rank
    partitioner: str
    # the pieces that the arrays above are about; None: whole samples
    division: Division | None = None

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


def find_lower_bound(costs: np.ndarray, ranks: int) -> float:
    """The least largest load that any assignment can have: the mean load, or the largest cost."""
    return max(float(costs.sum()) / ranks, float(costs.max(initial=0.0)))


Partitioner = Callable[[Problem], np.ndarray]


def assign(problem: Problem, partitioner: Partitioner) -> Assignment:
    """Calls a partitioner and checks its result.

    Raises ValueError, with the partitioner's name, for a wrong shape or dtype, a rank out of range,
    or a rank over the cap.
    """
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
    if problem.cap is not None:
        held = np.bincount(rank_of, problem.tokens, problem.ranks)
        if held.max() > problem.cap:
            over = int(held.argmax())
            raise ValueError(
                f"partitioner {name!r} gives rank {over} {int(held[over])} tokens, "
                f"over the cap of {problem.cap}"
            )
    loads = np.bincount(rank_of, problem.costs, problem.ranks)
    bound = find_lower_bound(problem.costs, problem.ranks)
    moved = int(problem.tokens[rank_of != problem.home].sum())
    before = np.bincount(problem.home, problem.costs, problem.ranks)
    return Assignment(rank_of, loads, before, bound, moved, name)
