"""Draws synthetic batches: lengths, runs of items, and the numbers that decide which events are
bound or hot (see generate.py). Measures their collision rate.

A history is made of runs. A run begins at a random point of [0, 1) and each next event steps by a
constant that belongs to the user's taste, modulo 1; an item owns an interval as wide as its
popularity. So every event is Zipf distributed, while the next item depends on the previous one and
on the taste: a model can beat popularity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.batch import compute_offsets
from freescale.random import derive, hash_name, integers, uniform

TASTES = 4
RUN_ENDS = 0.2  # probability that an event starts a new run
_SAMPLE_EVENTS = 2_000_000  # calibrates on this many events first
_CLOSE = 0.002  # distance to the target at which the search stops
SHORTEST = 2  # events of the shortest history


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths of histories, clipped to [SHORTEST, cap]."""

    ends: NDArray[np.float64]  # [cap + 1]: probability of a length of at most l

    @classmethod
    def from_options(
        cls, kind: str, median: float, sigma: float, exponent: float, cap: int
    ) -> LengthDistribution:
        """A `lognormal` (median, sigma of the logarithm) or `zipf` (exponent) distribution up to
        `cap`. ValueError for an unknown kind, or a median that is not above 0."""
        length = np.arange(cap + 1, dtype=np.float64)
        if kind == "lognormal":
            if median <= 0:
                raise ValueError(f"median is {median}; it must be above 0")
            z = (np.log(length + 0.5) - np.log(median)) / max(sigma, 1e-12)
            ends = 0.5 * (1 + torch.erf(torch.from_numpy(z) / 2**0.5).numpy())
        elif kind == "zipf":
            mass = np.where(length >= SHORTEST, np.maximum(length, 1) ** -exponent, 0.0)
            ends = np.cumsum(mass) / mass.sum()
        else:
            raise ValueError(f"lengths is {kind!r}; choose lognormal or zipf")
        ends[:SHORTEST], ends[-1] = 0.0, 1.0
        return cls(ends)

    @property
    def mean(self) -> float:
        return float((1 - self.ends).sum())

    def draw(self, seed: int, users: torch.Tensor) -> NDArray[Any]:
        """Lengths [n] int64 for users [n] int64: a pure function of the seed and the user."""
        drawn = uniform(derive(seed, hash_name("length"), users)).numpy()
        return np.searchsorted(self.ends, drawn, "right").astype(np.int64)


@dataclass
class DrawnBatch:
    """One global batch with everything that its items depend on."""

    users: Tensor  # [users] int64
    lengths: Tensor  # [users] int64
    ranks: NDArray[Any]  # [events]: popularity rank before binding
    bound: NDArray[Any]  # [events] in [0, 1)
    hot: NDArray[Any]  # [events] in [0, 1)
    hot_rank: NDArray[Any]  # [events]
    consumer: NDArray[Any]  # [events]: the rank (process) that reads the event
    inside_run: Tensor  # [events] bool
    keys: Tensor  # [events]
    parity: int


def find_ends(count: int, power: float) -> NDArray[np.float64]:
    """[count]: ends of intervals of [0, 1) whose lengths are Zipf distributed."""
    mass = np.arange(1, count + 1, dtype=np.float64) ** -power
    ends: NDArray[np.float64] = np.cumsum(mass) / mass.sum()
    ends[-1] = 1.0
    return ends


@dataclass
class SyntheticSource:
    """Draws batches; each is a pure function of the options and its number."""

    users: int
    items: int
    lengths: LengthDistribution
    popularity: float
    global_batch: int
    ranks: int
    seed: int

    def __post_init__(self) -> None:
        self.item_ends = find_ends(self.items, self.popularity)
        shuffled = derive(self.seed, hash_name("item ids"), torch.arange(self.items))
        # popular items lie anywhere in the table
        self.id_of_rank = torch.argsort(shuffled, stable=True).numpy()
        # each often enough in a batch
        drawn = self.lengths.mean * min(self.global_batch, self.users)
        self.hot_items = int(np.clip(drawn / 16, 1, self.items))

    @property
    def batches(self) -> int:
        return -(-self.users // self.global_batch)

    def draw_batch(self, number: int) -> DrawnBatch:
        users = torch.arange(
            number * self.global_batch, min((number + 1) * self.global_batch, self.users)
        )
        lengths = torch.from_numpy(self.lengths.draw(self.seed, users))
        count = len(users)
        # [events]: place of the user in the batch
        owner = torch.repeat_interleave(torch.arange(count), lengths)
        place = torch.arange(len(owner)) - compute_offsets(lengths)[owner]
        keys = derive(self.seed, hash_name("event"), users[owner], place)
        starts = (place == 0) | (uniform(derive(keys, 0)) < RUN_ENDS)
        # of the event's run
        begin = torch.cummax(torch.where(starts, torch.arange(len(owner)), 0), 0).values
        taste = integers(derive(self.seed, hash_name("taste"), users), TASTES)[owner]
        strides = uniform(derive(self.seed, hash_name("stride"), torch.arange(TASTES)))
        point = (
            uniform(derive(keys, 1))[begin] + (torch.arange(len(owner)) - begin) * strides[taste]
        ) % 1.0
        ranks = np.searchsorted(self.item_ends, point.numpy(), "right")
        edges = torch.arange(self.ranks + 1) * count // self.ranks  # users of each rank
        return DrawnBatch(
            users=users,
            lengths=lengths,
            ranks=ranks,
            bound=uniform(derive(keys, 2)).numpy(),
            hot=uniform(derive(keys, 3)).numpy(),
            hot_rank=integers(derive(keys, 4), self.hot_items).numpy(),
            consumer=(torch.searchsorted(edges, owner, right=True) - 1).numpy(),
            inside_run=~starts,
            keys=keys,
            parity=number % 2,
        )

    def choose_items(self, batch: DrawnBatch, mixing: float | None) -> NDArray[Any]:
        """[events] item ids. `mixing`: 0 binds every event, 1 none, 2 makes all hot; or None."""
        ranks = batch.ranks
        if mixing is not None:
            pairs = self.items // 2  # an odd number leaves out the least popular item
            binding = np.minimum(ranks // 2, pairs - 1) * 2 + batch.parity if pairs else ranks
            ranks = np.where(batch.bound < mixing, ranks, binding)
            ranks = np.where(batch.hot < mixing - 1, batch.hot_rank, ranks)
        ids: NDArray[np.int64] = self.id_of_rank[ranks]
        return ids

    def list_requests(self, batch: DrawnBatch, items: NDArray[Any]) -> NDArray[Any]:
        """Item ids that the batch requests, once per requesting rank."""
        return np.unique(batch.consumer * self.items + items) % self.items


class CollisionCounter:
    """Counts requests of each batch that the previous batch also made."""

    def __init__(self, items: int):
        self._seen = np.zeros(items, bool)
        self._last: NDArray[Any] | None = None
        self.hits = self.total = 0

    def add(self, requests: NDArray[Any]) -> None:
        if self._last is not None:
            self.hits += int(self._seen[requests].sum())
            self.total += len(requests)
            self._seen[self._last] = False
        self._seen[requests] = True
        self._last = requests

    @property
    def rate(self) -> float | None:
        return self.hits / self.total if self.total else None


def _measure_rate(source: SyntheticSource, batches: Iterable[DrawnBatch], mixing: float) -> float:
    """Collision rate over consecutive batches."""
    collisions = CollisionCounter(source.items)
    for batch in batches:
        collisions.add(source.list_requests(batch, source.choose_items(batch, mixing)))
    return collisions.rate or 0.0


def _bisect(measure: Callable[[float], float], target: float) -> tuple[float, float]:
    """(point in [0, 2], value) of an increasing function, closest to the target."""
    low, high = 0.0, 2.0
    best = (0.0, measure(0.0))
    for _ in range(26):
        if abs(best[1] - target) <= _CLOSE:
            break
        middle = (low + high) / 2
        value = measure(middle)
        best = min(best, (middle, value), key=lambda point: abs(point[1] - target))
        low, high = (middle, high) if value < target else (low, middle)
    return best


def calibrate_mixing(source: SyntheticSource, target: float) -> float:
    """Finds the mixing that meets the target, on the first batches, or on all if that misses. Only
    the first few batches are kept: memory does not grow with the file."""
    sample: list[DrawnBatch] = []
    while len(sample) < min(2, source.batches) or (
        len(sample) < source.batches and sum(len(batch.ranks) for batch in sample) < _SAMPLE_EVENTS
    ):
        sample.append(source.draw_batch(len(sample)))

    def measure_file(mixing: float) -> float:
        return _measure_rate(source, map(source.draw_batch, range(source.batches)), mixing)

    mixing, rate = _bisect(lambda mixing: _measure_rate(source, sample, mixing), target)
    if len(sample) < source.batches:
        rate = measure_file(mixing)
        if abs(rate - target) > 2 * _CLOSE:
            mixing, rate = _bisect(measure_file, target)
    if abs(rate - target) > 0.01:
        raise ValueError(
            f"collision {target} is out of reach: with {source.items} items and global batches of "
            f"{source.global_batch} users the nearest is {rate:.4f}; use that, or change "
            "those two"
        )
    return mixing
