"""What the ranks of a step compute and ask for: lengths, and how many rows each rank reads, of
which how many collide.

Two sources with the same verbs. `Generated` draws lengths like data/synthetic.py and knows the
popularity of every item: the rows a rank reads are then an expectation, summed over the catalogue
in strata: no noise, and a cost that does not grow with the tokens. `Recorded` reads a histories
file and finds the rows of its ids, by the collision masks of training; of many ids it looks at
those whose hash falls into a sample, and says how far that may be off.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from freescale.config import SimulateConfig
from freescale.data.draws import length_distribution
from freescale.embedding.collision import collision_masks
from freescale.embedding.layout import ShardLayout, TableSpec
from freescale.random import derive, hash_name, integers, uniform


@dataclass(frozen=True)
class Rows:
    """Requests of a step, each [ranks]: by the rank that asks, and by the rank that owns."""

    asked: np.ndarray
    owed: np.ndarray

    @staticmethod
    def spread(asked: np.ndarray) -> Rows:
        """Owners chosen by the layout's scattering: all alike."""
        return Rows(asked, np.full(len(asked), asked.mean()))

    def __sub__(self, other: Rows) -> Rows:
        return Rows(
            np.maximum(self.asked - other.asked, 0.0), np.maximum(self.owed - other.owed, 0.0)
        )


@dataclass(frozen=True)
class Demand:
    """Of one step: all requests, those whose row the step before reads too, those whose row the
    step after reads too."""

    whole: Rows
    late: Rows
    urgent: Rows

    @property
    def early(self) -> Rows:
        return self.whole - self.late

    @property
    def deferred(self) -> Rows:
        return self.whole - self.urgent


class Source(Protocol):
    notes: list[str]
    items: int  # rows of the table

    def lengths(self, step: int) -> np.ndarray:
        """[samples of the global batch] int64."""

    def asked(self, step: int, rank_of: np.ndarray, ranks: int) -> Any:
        """What the ranks ask for when sample i is computed on rank_of[i]. For `demand`."""

    def demand(self, before: Any | None, now: Any, after: Any | None) -> Demand:
        """The requests of `now`, between those of the steps around it."""


# ---- generated


@dataclass(frozen=True)
class _Drawn:
    tokens: np.ndarray  # [ranks]
    # [strata, 2]: that an event is one given item of the stratum, even and odd one of its pair
    chance: np.ndarray
    read: np.ndarray  # [strata, 2]: probability that anybody reads it


class Generated:
    """Log-normal lengths and Zipf ids of any size of catalogue."""

    def __init__(
        self,
        samples: int,
        *,
        median: float = SimulateConfig.median,
        sigma: float = SimulateConfig.sigma,
        cap: int = SimulateConfig.cap,
        items: int = SimulateConfig.items,
        popularity: float = SimulateConfig.popularity,
        collisions: float | None = SimulateConfig.collisions,
        seed: int = SimulateConfig.seed,
        strata: int = 1024,
    ) -> None:
        """`samples` of a global batch. `collisions`: share of a batch's requests that the batch
        before makes too, by binding items to batches or making them hot as data/synthetic.py does;
        None leaves what the popularity gives. Met for the mean rank."""
        if collisions is not None and not 0 <= collisions <= 1:
            raise ValueError(f"collisions is {collisions}; it is a share, from 0 to 1")
        if items < 2 or samples < 1 or strata < 8:
            raise ValueError(
                f"{samples} samples, {items} items, {strata} strata: at least 1, 2 and 8 are needed"
            )
        self.samples, self.items, self.seed, self._collisions = samples, items, seed, collisions
        self._ends = length_distribution("lognormal", median, sigma, 0.0, cap)
        self._count, self._mass = _strata(items // 2, strata, popularity)
        # pairs: each often enough in a batch
        self._hot = min(items // 2, max(1, int(self._mean * samples / 32)))
        self._mixing: dict[int, float] = {}
        self.notes = [
            f"generated: median {median:g}, longest {cap:,}, {items:,} items of popularity "
            f"{popularity:g}; "
            f"rows by expectation over {len(self._count):,} strata of the catalogue"
        ]

    @property
    def _mean(self) -> float:
        return float((1 - self._ends).sum())

    def lengths(self, step: int) -> np.ndarray:
        users = torch.arange(step * self.samples, (step + 1) * self.samples)
        return np.searchsorted(
            self._ends, uniform(derive(self.seed, hash_name("length"), users)).numpy(), "right"
        ).astype(np.int64)

    def asked(self, step: int, rank_of: np.ndarray, ranks: int) -> _Drawn:
        tokens = np.bincount(rank_of, self.lengths(step), ranks)
        if ranks not in self._mixing:
            self._mixing[ranks] = (
                1.0 if self._collisions is None else self._mixed(self._collisions, ranks)
            )
        chance = self._chance(self._mixing[ranks], step % 2)
        return _Drawn(tokens, chance, -np.expm1(float(tokens.sum()) * np.log1p(-chance)))

    def demand(self, before: _Drawn | None, now: _Drawn, after: _Drawn | None) -> Demand:
        parts = [np.ones_like(now.read)] + [
            np.zeros_like(now.read) if other is None else other.read for other in (before, after)
        ]
        # [strata * 2, 3]
        weights = np.stack([(self._count[:, None] * part).ravel() for part in parts], axis=1)
        rate = np.log1p(-now.chance).ravel()
        asked = np.empty((len(now.tokens), 3))
        # ranks in blocks: the probabilities of all would take gigabytes
        for first in range(0, len(now.tokens), 256):
            block = slice(first, first + 256)
            asked[block] = -np.expm1(now.tokens[block, None] * rate) @ weights
        return Demand(*(Rows.spread(asked[:, column]) for column in range(3)))

    def _chance(self, mixing: float, parity: int) -> np.ndarray:
        """[strata, 2]. mixing: 0 binds every event to its batch's item of the pair, 1 none, 2 makes
        every event hot."""
        free, hot = min(mixing, 1.0), max(mixing - 1.0, 0.0)
        mass = self._mass[:, None] / 2 * np.ones(2)
        bound = self._mass[:, None] * (np.arange(2) == parity)
        first = np.concatenate([[0], np.cumsum(self._count)[:-1]])
        inside = np.clip((self._hot - first) / self._count, 0, 1)  # part of the stratum that is hot
        heated = (inside / (2 * self._hot))[:, None] * np.ones(2)
        return np.minimum((1 - hot) * (free * mass + (1 - free) * bound) + hot * heated, 1 - 1e-12)

    def _mixed(self, target: float, ranks: int) -> float:
        tokens = np.full(ranks, self._mean * self.samples / ranks)

        def rate(mixing: float) -> float:
            now, then = (self._chance(mixing, parity) for parity in (0, 1))
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


def _strata(pairs: int, strata: int, popularity: float) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of items by popularity, the first ones alone, then in ranges that grow: (pairs in each,
    mass of one pair)."""
    edges = np.unique(
        np.concatenate(
            [
                np.arange(min(pairs, strata // 2) + 1),
                np.geomspace(1, pairs, strata).astype(np.int64),
                [pairs],
            ]
        )
    )
    low, high = edges[:-1].astype(np.float64), edges[1:].astype(np.float64)
    count = high - low
    # Mean of place^-popularity over a range: by the integral between the half-way points, which is
    # what the sum comes to.
    a, b = low + 0.5, high + 0.5
    integral = (
        np.log(b / a)
        if popularity == 1
        else (b ** (1 - popularity) - a ** (1 - popularity)) / (1 - popularity)
    )
    mass = np.where(count == 1, high**-popularity, integral / count)
    return count, mass / (mass * count).sum()


# ---- recorded


@dataclass(frozen=True)
class _Read:
    keys: torch.Tensor  # [requests]: owner * size + row
    rank: np.ndarray  # [requests]: who asks
    tokens: np.ndarray  # [ranks]
    scale: float  # requests that each stands for
    size: int  # rows of an owner


class Recorded:
    """The lengths and ids of a histories file. Where it has fewer users than a global batch, they
    come again: noted."""

    def __init__(
        self,
        path: str | Path,
        samples: int,
        *,
        cap: int = SimulateConfig.cap,
        seed: int = SimulateConfig.seed,
        events: int = 4_000_000,
    ) -> None:
        """`events` of a step are looked at, at most; of more, a sample by the hash of the id."""
        from freescale.data.loader import Histories

        self.samples, self._events = samples, events
        whole = Histories(path, 1, split="none", max_length=cap, seed=seed)
        self._size = min(samples, whole.num_samples)
        self._data = Histories(
            path, self._size, split="none", max_length=cap, seed=seed, epochs=1 << 30, negatives=0
        )
        self.items = self._data.num_items
        self.notes = [f"histories of {path}: {whole.num_samples:,} users, {self.items:,} items"]
        if whole.num_samples < samples:
            self.notes.append(
                f"REPEATED: a step has {samples:,} samples, the file {whole.num_samples:,} users: "
                "they come again within a step, "
                "and share more rows than as many different users would"
            )
        self._sampled = 1
        self._batch = lru_cache(4)(self._read)

    def _read(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(lengths [samples], ids [events])."""
        parts = -(-self.samples // self._size)
        histories = [
            self._data.batch(self._full(step * parts + part)).sequences["history"]
            for part in range(parts)
        ]
        lengths = torch.cat([history.lengths for history in histories])[: self.samples]
        return lengths.numpy(), torch.cat([history.values for history in histories])[
            : int(lengths.sum())
        ].numpy()

    def _full(self, turn: int) -> int:
        """The number of the batch of this turn, when the smaller one at the end of each epoch is
        left out."""
        epoch, index = divmod(turn, self._data.num_samples // self._size)
        return epoch * self._data.batches_per_epoch + index

    def lengths(self, step: int) -> np.ndarray:
        return self._batch(step)[0]

    def asked(self, step: int, rank_of: np.ndarray, ranks: int) -> _Read:
        lengths, ids = self._batch(step)
        consumer = np.repeat(rank_of, lengths)
        if not step:
            self._sampled = max(1, -(-len(ids) // self._events))
        if self._sampled > 1:
            kept = (
                integers(derive(hash_name("simulated"), torch.from_numpy(ids)), self._sampled) == 0
            ).numpy()
            ids, consumer = ids[kept], consumer[kept]
        spec = TableSpec("item", self.items, 1, torch.float32, ())
        layout = ShardLayout((spec,), ranks)
        keys = layout.compute_keys(0, torch.from_numpy(ids)).numpy()
        both = np.unique(consumer * (layout.size * ranks) + keys)
        tokens = np.bincount(rank_of, lengths, ranks)
        return _Read(
            torch.from_numpy(both % (layout.size * ranks)),
            both // (layout.size * ranks),
            tokens,
            self._sampled,
            layout.size,
        )

    def demand(self, before: _Read | None, now: _Read, after: _Read | None) -> Demand:
        none = torch.zeros_like(now.keys, dtype=torch.bool)
        late = none if before is None else collision_masks(before.keys, now.keys)[1]
        shared = none if after is None else collision_masks(now.keys, after.keys)[0]
        return Demand(*(self._rows(now, mask.numpy()) for mask in (~none, late, shared)))

    def _rows(self, read: _Read, mask: np.ndarray) -> Rows:
        ranks = len(read.tokens)
        asked = np.bincount(read.rank[mask], minlength=ranks) * float(read.scale)
        if read.scale == 1:
            return Rows(
                asked,
                np.bincount(read.keys.numpy()[mask] // read.size, minlength=ranks).astype(
                    np.float64
                ),
            )
        return Rows.spread(_smoothed(asked, read.tokens))

    def error_note(self, ranks: int) -> str:
        if self._sampled == 1:
            return "rows: of all ids, found by the collision masks of training"
        lengths = self.lengths(0)
        error = self.sampling_error(
            self.asked(0, np.arange(len(lengths)) * ranks // len(lengths), ranks)
        )
        return (
            f"SAMPLED: rows of one id in {self._sampled}, by its hash; standard error of the "
            f"rows asked for {100 * error:.2f} %"
        )

    def sampling_error(self, read: _Read) -> float:
        """Standard error of the rows that a step asks for, as a share of them: 0 when all ids are
        looked at."""
        if read.scale == 1:
            return 0.0
        groups = integers(derive(hash_name("groups"), read.keys), 16).numpy()
        counts = np.bincount(groups, minlength=16)
        return float(counts.std(ddof=1) / counts.mean() / 4)


def _smoothed(asked: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Rows a rank asks for as a power of its tokens, fitted over the ranks: a sample of the ids
    makes each rank's own count noisy, and the slowest rank of many would be the noisiest."""
    seen = (asked > 0) & (tokens > 0)
    if seen.sum() < 3 or np.ptp(tokens[seen]) == 0:
        return np.where(tokens > 0, asked[seen].mean() if seen.any() else 0.0, 0.0)
    slope, height = np.polyfit(np.log(tokens[seen]), np.log(asked[seen]), 1)
    fitted = np.where(tokens > 0, np.exp(height + slope * np.log(np.maximum(tokens, 1))), 0.0)
    return fitted * (asked.sum() / fitted.sum())
