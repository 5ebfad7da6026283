"""Generated histories: log-normal lengths like those of data/synthetic, and ids by popularity.

The popularity of every item is known, so the rows that a rank reads are an expectation, summed over
the catalogue in strata: without noise, and at a cost that does not grow with the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.config import SimulateConfig
from freescale.data.synthetic.draws import LengthDistribution
from freescale.simulate.workload import Demand, PooledDemand, Rows, SmallTable


@dataclass(frozen=True)
class _ExpectedRequests:
    tokens: NDArray[Any]  # [ranks]
    # [strata, 2]: probability of one item of the stratum, for the even and the odd one of its pair
    chance: NDArray[Any]
    read: NDArray[Any]  # [strata, 2]: probability that anybody reads it
    samples: NDArray[Any]  # [ranks]


@dataclass(frozen=True)
class PooledFeatures:
    """Features of a sample in addition to its history, each with its own table."""

    features: int
    ids: int  # number of ids of a sample, in each feature
    rows: int  # number of rows of each table
    popularity: float  # Zipf exponent of the ids, independent of the previous batch

    def compute_demand(
        self, samples: NDArray[Any], before: NDArray[Any] | None, after: NDArray[Any] | None
    ) -> PooledDemand:
        """samples [ranks] of this step, of the one before and of the one after."""
        count, mass = _make_strata(self.rows, 1024, self.popularity)
        rate = np.log1p(-np.minimum(mass, 1 - 1e-12))

        def count_rows(weights: NDArray[Any]) -> Rows:
            chance = -np.expm1(samples[:, None] * self.ids * rate)
            return Rows.spread(self.features * (chance @ (count * weights)))

        def read_by_anybody(other: NDArray[Any] | None) -> NDArray[Any]:
            total = 0.0 if other is None else float(other.sum())
            return np.asarray(-np.expm1(total * self.ids * rate))

        return PooledDemand(
            count_rows(np.ones_like(mass)),
            count_rows(read_by_anybody(before)),
            count_rows(read_by_anybody(after)),
            samples * float(self.features * self.ids),
            samples * float(self.features),
        )


class GeneratedWorkload:
    """Log-normal lengths and Zipf ids, for a catalogue of any size. ValueError for an option out of
    range; or later, for collisions out of reach.

    `collisions` is the share of a batch's requests that the previous batch makes too, for the mean
    rank: items are bound to batches or made hot as in data/synthetic. None: by popularity.
    """

    bytes_per_token = 16  # id and target of each event

    def __init__(
        self,
        samples: int,  # size of a global batch
        *,
        median: float = SimulateConfig.median,
        sigma: float = SimulateConfig.sigma,
        cap: int = SimulateConfig.cap,
        items: int = SimulateConfig.items,
        popularity: float = SimulateConfig.popularity,
        collisions: float | None = SimulateConfig.collisions,
        seed: int = SimulateConfig.seed,
        strata: int = 1024,  # parts of the catalogue over which expectations are summed
        pooled: PooledFeatures | None = None,
    ) -> None:
        if collisions is not None and not 0 <= collisions <= 1:
            raise ValueError(f"collisions is {collisions}; it is a share, from 0 to 1")
        self.samples, self.items, self.seed, self._collisions = samples, items, seed, collisions
        self._pooled = pooled
        # ids and lengths of pooled features move with a sample
        self.bytes_per_sample = 8 * pooled.features * (pooled.ids + 1) if pooled else 0
        self._lengths = LengthDistribution.from_options("lognormal", median, sigma, 0.0, cap)
        self._count, self._mass = _make_strata(items // 2, strata, popularity)
        # pairs: each often enough in a batch
        self._hot = min(items // 2, max(1, int(self._lengths.mean * samples / 32)))
        self._find_mixing = cache(self._search_mixing)
        self.notes = [
            f"generated: median {median:g}, longest {cap:,}, {items:,} items of popularity "
            f"{popularity:g}; "
            f"rows by expectation over {len(self._count):,} strata of the catalogue"
        ]
        if pooled is not None:
            self.notes.append(
                f"{pooled.features} pooled features of {pooled.ids} ids a sample, tables of "
                f"{pooled.rows:,} rows, sharded where the item table is; TorchRec's owners pool, "
                "here requesters do"
            )

    def list_small_tables(self, ranks: int) -> list[SmallTable]:
        return []

    def get_lengths(self, step: int) -> NDArray[Any]:
        users = torch.arange(step * self.samples, (step + 1) * self.samples)
        return self._lengths.draw(self.seed, users)

    def find_requests(self, step: int, rank_of: NDArray[Any], ranks: int) -> _ExpectedRequests:
        tokens = np.bincount(rank_of, self.get_lengths(step), ranks)
        chance = self._compute_chance(self._find_mixing(ranks), step % 2)
        read = -np.expm1(float(tokens.sum()) * np.log1p(-chance))
        return _ExpectedRequests(tokens, chance, read, np.bincount(rank_of, minlength=ranks))

    def compute_demand(
        self,
        before: _ExpectedRequests | None,
        now: _ExpectedRequests,
        after: _ExpectedRequests | None,
    ) -> Demand:
        parts = [np.ones_like(now.read)] + [
            np.zeros_like(now.read) if other is None else other.read for other in (before, after)
        ]
        # [strata * 2, 3]
        weights = np.stack([(self._count[:, None] * part).ravel() for part in parts], axis=1)
        rate = np.log1p(-now.chance).ravel()
        requested = np.empty((len(now.tokens), 3))
        # ranks in blocks: the probabilities of all would take gigabytes
        for first in range(0, len(now.tokens), 256):
            block = slice(first, first + 256)
            requested[block] = -np.expm1(now.tokens[block, None] * rate) @ weights
        whole, late, urgent = (Rows.spread(requested[:, column]) for column in range(3))
        pooled = None
        if self._pooled is not None:
            around = (None if other is None else other.samples for other in (before, after))
            pooled = self._pooled.compute_demand(now.samples, *around)
        return Demand(whole, late, urgent, pooled=pooled)

    def list_growth_steps(self, steps: int) -> list[int]:
        return [10**power for power in range(6)]

    def count_admitted(self, steps: Sequence[int], seen: int, ranks: int) -> list[float]:
        """By expectation, over batches of the mean number of events."""
        mixing = self._find_mixing(ranks)
        events = self._lengths.mean * self.samples
        # [2 kinds of batches][strata, 2]: that a batch holds the item
        held = [
            -np.expm1(events * np.log1p(-self._compute_chance(mixing, parity))) for parity in (0, 1)
        ]
        found = []
        for count in steps:
            batches = (-(-count // 2), count // 2)
            fewer = np.zeros_like(held[0])
            for first in range(seen):
                for second in range(seen - first):
                    fewer += _bind(batches[0], first, held[0]) * _bind(batches[1], second, held[1])
            found.append(float((self._count[:, None] * (1 - fewer)).sum()))
        return found

    def _compute_chance(self, mixing: float, parity: int) -> NDArray[Any]:
        """[strata, 2]: the probability that an event is a given item. `mixing`: 0 binds every event
        to its batch's item of the pair, 1 binds none, 2 makes every event hot."""
        free, hot = min(mixing, 1.0), max(mixing - 1.0, 0.0)
        mass = self._mass[:, None] / 2 * np.ones(2)
        bound = self._mass[:, None] * (np.arange(2) == parity)
        first = np.concatenate([[0], np.cumsum(self._count)[:-1]])
        inside = np.clip((self._hot - first) / self._count, 0, 1)  # part of the stratum that is hot
        heated = (inside / (2 * self._hot))[:, None] * np.ones(2)
        chance = (1 - hot) * (free * mass + (1 - free) * bound) + hot * heated
        return np.asarray(np.minimum(chance, 1 - 1e-12))

    def _search_mixing(self, ranks: int) -> float:
        """The mixing that gives the wanted collisions."""
        target = self._collisions
        if target is None:
            return 1.0
        tokens = np.full(ranks, self._lengths.mean * self.samples / ranks)

        def rate(mixing: float) -> float:
            now, then = (self._compute_chance(mixing, parity) for parity in (0, 1))
            mine = self._count[:, None] * -np.expm1(tokens[0] * np.log1p(-now))
            return float((mine * -np.expm1(tokens.sum() * np.log1p(-then))).sum() / mine.sum())

        low, high = 0.0, 2.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if rate(middle) < target else (low, middle)
        if abs(rate(high) - target) > 0.01:
            raise ValueError(
                f"collisions {target} are out of reach: the nearest is {rate(high):.3f}; ask for "
                "that, or for more items"
            )
        return high


def _bind(draws: int, hits: int, chance: NDArray[Any]) -> NDArray[Any]:
    """The probability of so many hits in some draws, each with the probability `chance`."""
    if hits > draws:
        return np.zeros_like(chance)
    ways = math.comb(draws, hits)
    none = np.exp((draws - hits) * np.log1p(-np.minimum(chance, 1 - 1e-15)))
    return np.asarray(ways * chance**hits * none)


def _make_strata(pairs: int, strata: int, popularity: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Pairs of items by popularity, the first ones alone, then in ranges that grow: (pairs in each,
    mass of one pair)."""
    alone = np.arange(min(pairs, strata // 2) + 1)
    ranges = np.geomspace(1, pairs, strata).astype(np.int64)
    edges = np.unique(np.concatenate([alone, ranges, [pairs]]))
    low, high = edges[:-1].astype(np.float64), edges[1:].astype(np.float64)
    count = high - low
    # The mean of place^-popularity over a range: close to the integral between half-way points.
    a, b = low + 0.5, high + 0.5
    integral = (
        np.log(b / a)
        if popularity == 1
        else (b ** (1 - popularity) - a ** (1 - popularity)) / (1 - popularity)
    )
    mass = np.where(count == 1, high**-popularity, integral / count)
    return count, mass / (mass * count).sum()
