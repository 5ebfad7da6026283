"""The lengths and ids of a histories file; the rows of its ids are found by the collision masks of
training. If there are many ids, a sample by hash is used, and its standard error is reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.batch import SequenceBatch
from freescale.data.batches.loader import Histories
from freescale.data.batches.specs import ReadSpec
from freescale.embedding.collision import collision_masks
from freescale.embedding.layout import ShardLayout, TableSpec
from freescale.random import derive, hash_name, integers
from freescale.simulate.placed_tables import assign_home
from freescale.simulate.workload import Demand, Rows, SmallTable

_HASHED = 1 << 40  # of ids without a bound


@dataclass(frozen=True)
class _Requests:
    keys: torch.Tensor  # [requests]: owner * size + row
    rank: NDArray[Any]  # [requests]: the requesting rank
    lookups: NDArray[Any]  # [ranks]: ids before deduplication
    scale: float  # requests that each represents
    size: int  # rows of an owner


@dataclass(frozen=True)
class _Read:
    """The ids that a step requests of the item table, before deduplication."""

    lengths: NDArray[Any]  # [samples]: tokens of each in the encoder
    ids: NDArray[Any]  # [lookups]
    sample: NDArray[Any]  # [lookups]: the sample that reads it; -1: every rank


class RecordedWorkload:
    """The batches of a histories file as training reads them: the same samples in the same order,
    with their targets and negatives or candidates. If a global batch has more samples than the
    file, users are repeated, with a note.

    Args:
        path: A histories file.
        samples: Size of a global batch.
        read: Order and seed. There is no last epoch.
        events: Most ids of a step; if there are more, a sample by their hash is used.
        name: Name of the file in notes; its path by default.
        specs: Further specs of `Histories`.
    """

    def __init__(
        self,
        path: str | Path,
        samples: int,
        *,
        read: ReadSpec | None = None,
        events: int = 4_000_000,
        name: str | None = None,
        **specs: Any,
    ) -> None:
        self.samples, self._events = samples, events
        specs["read"] = replace(read or ReadSpec(), epochs=1 << 30)
        whole = Histories(path, 1, **specs)
        self._size = min(samples, whole.num_samples)
        self._data = Histories(path, self._size, **specs)
        # ids of a dynamic table are any numbers: hashed into a range that the arithmetic supports
        self._space = _HASHED if self._data.any_ids else self._data.num_items
        self.items = max(2, self._data.num_items)
        self.notes = [
            f"histories of {name or path}: {whole.num_samples:,} users, {self.items:,} items"
        ]
        self.bytes_per_token, self.bytes_per_sample = _measure_columns(self._data.batch(0))
        if whole.num_samples < samples:
            self.notes.append(
                f"REPEATED: a step has {samples:,} samples, the file {whole.num_samples:,} users: "
                "they come again within a step, "
                "and share more rows than as many different users would"
            )
        self._sampled = 1
        self._batch = lru_cache(4)(self._read)

    def list_small_tables(self, ranks: int) -> list[SmallTable]:
        rows = self._data.num_actions
        if not rows:
            return []
        history = next(self._read_batches(0)).sequences["actions"]
        rank = np.repeat(assign_home(len(history.lengths), ranks), history.lengths.numpy())
        read = len(np.unique(rank * rows + history.values.numpy())) / ranks
        return [SmallTable("action", rows, read)]

    def _read(self, step: int) -> _Read:
        read = [_list_lookups(batch, part) for part, batch in enumerate(self._read_batches(step))]
        first = np.cumsum([0, *(len(one.lengths) for one in read)])
        sample = np.concatenate(
            [np.where(one.sample < 0, -1, one.sample + at) for one, at in zip(read, first)]
        )
        ids = np.concatenate([one.ids for one in read])
        if self._data.any_ids:
            ids = integers(derive(hash_name("any id"), torch.from_numpy(ids)), _HASHED).numpy()
        kept = sample < self.samples
        lengths = np.concatenate([one.lengths for one in read])[: self.samples]
        return _Read(lengths, ids[kept], sample[kept])

    def _read_batches(self, step: int) -> Iterator[SequenceBatch]:
        """The batches of the file that make up a step, without the smaller ones at the end of each
        epoch."""
        parts = -(-self.samples // self._size)
        for turn in range(step * parts, (step + 1) * parts):
            epoch, index = divmod(turn, self._data.num_samples // self._size)
            yield self._data.batch(epoch * self._data.batches_per_epoch + index)

    def list_growth_steps(self, steps: int) -> list[int]:
        rounds = [number * 10**power for power in range(6) for number in (1, 2, 5)]
        return sorted({*(count for count in rounds if count < steps), steps})

    def count_admitted(self, steps: Sequence[int], seen: int, ranks: int) -> list[float]:
        """Of the ids themselves."""
        known, batches, found = np.zeros(0, np.int64), np.zeros(0, np.int64), []
        for step in range(max(steps, default=0)):
            ids = [_list_counted(batch) for batch in self._read_batches(step)]
            both = np.concatenate([known, np.unique(np.concatenate(ids))])
            known, place = np.unique(both, return_inverse=True)
            counts = np.concatenate([batches, np.ones(len(both) - len(batches), np.int64)])
            batches = np.bincount(place, counts).astype(np.int64)
            if step + 1 in steps:
                found.append(float((batches >= seen).sum()))
        return found

    def get_lengths(self, step: int) -> NDArray[Any]:
        return self._batch(step).lengths

    def find_requests(self, step: int, rank_of: NDArray[Any], ranks: int) -> _Requests:
        read = self._batch(step)
        alone = read.sample >= 0
        ids, consumer = read.ids[alone], rank_of[read.sample[alone]]
        if not alone.all():  # what every rank reads
            shared = read.ids[~alone]
            ids = np.concatenate([ids, np.tile(shared, ranks)])
            consumer = np.concatenate([consumer, np.repeat(np.arange(ranks), len(shared))])
        lookups = np.bincount(consumer, minlength=ranks).astype(np.float64)
        if not step:
            self._sampled = max(1, -(-len(ids) // self._events))
        if self._sampled > 1:
            drawn = integers(derive(hash_name("simulated"), torch.from_numpy(ids)), self._sampled)
            kept = (drawn == 0).numpy()
            ids, consumer = ids[kept], consumer[kept]
        both = _find_unique(consumer * self._space + ids, ranks * self._space)
        spec = TableSpec("item", self._space, 1, torch.float32, ())
        layout = ShardLayout((spec,), ranks)
        keys = layout.compute_keys(0, torch.from_numpy(both % self._space))
        return _Requests(keys, both // self._space, lookups, self._sampled, layout.size)

    def compute_demand(
        self, before: _Requests | None, now: _Requests, after: _Requests | None
    ) -> Demand:
        none = torch.zeros_like(now.keys, dtype=torch.bool)
        late = none if before is None else collision_masks(before.keys, now.keys)[1]
        shared = none if after is None else collision_masks(now.keys, after.keys)[0]
        masks = (~none, late, shared)
        whole, colliding, urgent = (self._count_rows(now, mask.numpy()) for mask in masks)
        return Demand(whole, colliding, urgent, now.lookups)

    def _count_rows(self, read: _Requests, mask: NDArray[Any]) -> Rows:
        ranks = len(read.lookups)
        requested = np.bincount(read.rank[mask], minlength=ranks) * float(read.scale)
        if read.scale == 1:
            owned = np.bincount(read.keys.numpy()[mask] // read.size, minlength=ranks)
            return Rows(requested, owned.astype(np.float64))
        return Rows.spread(_smooth(requested, read.lookups))

    def describe_error(self, ranks: int) -> str:
        if self._sampled == 1:
            return "rows: of all ids, found by the collision masks of training"
        home = assign_home(len(self.get_lengths(0)), ranks)
        error = self.estimate_error(self.find_requests(0, home, ranks))
        return (
            f"SAMPLED: rows of one id in {self._sampled}, by its hash; standard error of the "
            f"requested rows {100 * error:.2f} %"
        )

    def estimate_error(self, read: _Requests) -> float:
        """Relative standard error of the rows that a step requests: 0 without sampling."""
        if read.scale == 1:
            return 0.0
        groups = integers(derive(hash_name("groups"), read.keys), 16).numpy()
        counts = np.bincount(groups, minlength=16)
        return float(counts.std(ddof=1) / counts.mean() / 4)


def _list_lookups(batch: SequenceBatch, part: int) -> _Read:
    """The ids that a batch reads from the item table. `part`: its number in a step of several
    batches; shared negatives are those of the first."""
    history = batch.sequences["history"]
    number, lengths = np.arange(len(history.lengths)), history.lengths.numpy()
    token = np.repeat(number, lengths)
    read = [(history.values, token)]
    if "targets" in batch.sequences:
        read.append((batch.values("targets"), token))
    if "candidates" in batch.candidates:
        counts = batch.candidates["candidates"].counts.numpy()
        read.append((batch.values("candidates"), np.repeat(number, counts)))
        lengths = lengths + counts
    if "negatives" in batch:
        negatives = batch.values("negatives")
        if "negatives" in batch.shared:
            reader = np.full(len(negatives), -1)
            read += [(negatives, reader)] if part == 0 else []
        else:
            each = token if "negatives" in batch.sequences else number
            read.append((negatives.reshape(-1), np.repeat(each, negatives.shape[1])))
    return _Read(
        lengths,
        np.concatenate([ids.numpy() for ids, _ in read]),
        np.concatenate([reader for _, reader in read]),
    )


def _list_counted(batch: SequenceBatch) -> NDArray[np.int64]:
    """Ids of a batch that a dynamic table counts."""
    names = [name for name in ("history", "targets", "candidates") if name in batch]
    return np.concatenate([batch.values(name).numpy() for name in names])


def _find_unique(keys: NDArray[Any], space: int) -> NDArray[Any]:
    """keys [n] below `space`, each once and in order. Marks are faster than sorting unless there
    are many more possible keys than keys."""
    if space <= 16 * len(keys):
        marks = np.zeros(space, bool)
        marks[keys] = True
        return np.flatnonzero(marks)
    ordered = np.sort(keys)
    return ordered[np.diff(ordered, prepend=-1) > 0]


def _measure_columns(batch: SequenceBatch) -> tuple[int, int]:
    """Bytes of a token, and of a sample without its tokens."""

    def measure(columns: Iterable[torch.Tensor]) -> int:
        return sum(one.element_size() * one[:1].numel() for one in columns)

    tokens = measure(column.values for column in batch.sequences.values())
    keys = [] if batch.keys is None else [batch.keys]
    return tokens, measure([*batch.dense.values(), *batch.weights.values(), *keys])


def _smooth(requested: NDArray[Any], lookups: NDArray[Any]) -> NDArray[Any]:
    """Fits the rows that a rank requests as a power of its lookups. Sampling makes each rank's own
    count noisy, and the slowest of many ranks would be the noisiest."""
    seen = (requested > 0) & (lookups > 0)
    if seen.sum() < 3 or np.ptp(lookups[seen]) == 0:
        return np.where(lookups > 0, requested[seen].mean() if seen.any() else 0.0, 0.0)
    slope, height = np.polyfit(np.log(lookups[seen]), np.log(requested[seen]), 1)
    fitted = np.where(lookups > 0, np.exp(height + slope * np.log(np.maximum(lookups, 1))), 0.0)
    return np.asarray(fitted * (requested.sum() / fitted.sum()))
