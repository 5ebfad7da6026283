"""The lengths and ids of a histories file; the rows of its ids are found by the collision masks of
training. If there are many ids, a sample by hash is used, and its standard error is reported."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from freescale.simulate.compute import Model
from freescale.simulate.placed_tables import ITEM, assign_home, place_tables
from freescale.simulate.workload import Demand, Rows, SmallTable

_HASHED = 1 << 40  # of ids without a bound

_Readers = Mapping[str, NDArray[Any]]  # feature of a batch -> [n] the sample that reads each entry


@dataclass(frozen=True)
class _Requests:
    keys: torch.Tensor  # [requests]: owner * size + row
    rank: NDArray[Any]  # [requests]: the requesting rank
    lookups: NDArray[Any]  # [ranks]: ids before deduplication
    scale: float  # requests that each represents
    size: int  # rows of an owner


@dataclass(frozen=True)
class _Read:
    """The ids that a step requests of sharded tables, before deduplication."""

    lengths: NDArray[Any]  # [samples]: tokens of each in the encoder
    ids: NDArray[Any]  # [lookups]
    sample: NDArray[Any]  # [lookups]: the sample that reads it; -1: every rank


class RecordedWorkload:
    """The batches of a histories file as training reads them: the same samples in the same order,
    with their targets and negatives or candidates. If a global batch has more samples than the
    file, users are repeated, with a note."""

    def __init__(
        self,
        path: str | Path,
        samples: int,  # size of a global batch
        *,
        read: ReadSpec | None = None,  # order and seed; there is no last epoch
        events: int = 4_000_000,  # most ids of a step; of more, a sample by hash is used
        name: str | None = None,  # name of the file in notes; its path by default
        **specs: Any,  # further arguments of `Histories`
    ) -> None:
        self.samples, self._events = samples, events
        specs["read"] = replace(read or ReadSpec(), epochs=1 << 30)
        whole = Histories(path, 1, **specs)
        self._size = min(samples, whole.num_samples)
        self._data = Histories(path, self._size, **specs)
        # ids of a dynamic table are any numbers: hashed into a range that the arithmetic supports
        self._space = _HASHED if self._data.any_ids else self._data.num_items
        self._first = {ITEM: 0}  # sharded tables: where their ids begin among those of all
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
        rows, features = {"action": self._data.num_actions}, self._data.features
        if features is not None:
            for source in ("item", "event", "user"):
                rows[f"{source}_features"] = getattr(features, f"{source}_rows")
        batch = next(self._read_batches(0))
        lengths, readers = _find_readers(batch, 0)
        found = []
        for name, count in rows.items():
            if count:
                read = _list_lookups(batch, readers[name])
                ids, rank = _assign(*read, assign_home(len(lengths), ranks), ranks)
                each = len(np.unique(rank * count + ids)) / ranks
                found.append(SmallTable(name, count, each, name in self._first))
        return found

    def shard_large_tables(self, model: Model, ranks: int) -> None:
        """From now on requests include those of tables that the placement rule shards, if it shards
        the item table."""
        placed = place_tables("auto", model, self, ranks)
        for table in self.list_small_tables(ranks):
            if placed.sharded and placed.placements[table.name].kind == "sharded":
                self._first[table.name] = self._space
                self._space += table.rows
        self._batch.cache_clear()

    def _read(self, step: int) -> _Read:
        lengths, ids, samples = np.zeros(0, np.int64), [], []
        for part, batch in enumerate(self._read_batches(step)):
            own, readers = _find_readers(batch, part)
            for table, first in self._first.items():
                read, sample = _list_lookups(batch, readers[table])
                if table == ITEM and self._data.any_ids:
                    hashed = derive(hash_name("any id"), torch.from_numpy(read))
                    read = integers(hashed, _HASHED).numpy()
                ids.append(read + first)
                samples.append(np.where(sample < 0, -1, sample + len(lengths)))
            lengths = np.concatenate([lengths, own])
        sample = np.concatenate(samples)
        kept = sample < self.samples
        return _Read(lengths[: self.samples], np.concatenate(ids)[kept], sample[kept])

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
        ids, consumer = _assign(read.ids, read.sample, rank_of, ranks)
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


def _find_readers(batch: SequenceBatch, part: int) -> tuple[NDArray[Any], dict[str, _Readers]]:
    """The tokens of each sample in the encoder, and the readers of each table. `part`: the number
    of the batch in a step of several; shared negatives are those of the first."""
    history = batch.sequences["history"]
    number, lengths = np.arange(len(history.lengths)), history.lengths.numpy()
    token = np.repeat(number, lengths)
    readers = {"history": token}
    if "targets" in batch.sequences:
        readers["targets"] = token
    if "candidates" in batch.candidates:
        counts = batch.candidates["candidates"].counts.numpy()
        readers["candidates"] = np.repeat(number, counts)
        lengths = lengths + counts
    if "negatives" in batch.shared:
        negatives = np.full(len(batch.values("negatives")), -1)
        readers |= {"negatives": negatives} if part == 0 else {}
    elif "negatives" in batch:
        readers["negatives"] = token if "negatives" in batch.sequences else number
    return lengths, {
        ITEM: readers,
        "action": {"actions": token},
        "item_features": {f"{name}_features": reader for name, reader in readers.items()},
        "event_features": {"event_features": token},
        "context_features": {"context_features": readers.get("candidates", token)},
        "user_features": {"user_features": number},
    }


def _list_lookups(batch: SequenceBatch, readers: _Readers) -> tuple[NDArray[Any], NDArray[Any]]:
    """The ids [lookups] that a batch reads of a table, and the sample that reads each."""
    read = [(batch.values(name).numpy(), reader) for name, reader in readers.items()]
    each = [np.repeat(reader, math.prod(values.shape[1:])) for values, reader in read]
    return np.concatenate([values.reshape(-1) for values, _ in read]), np.concatenate(each)


def _assign(
    ids: NDArray[Any], sample: NDArray[Any], rank_of: NDArray[Any], ranks: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The ids that ranks read and the rank of each; those of no sample are read by every rank."""
    alone = sample >= 0
    shared = ids[~alone]
    consumer = rank_of[sample[alone]], np.repeat(np.arange(ranks), len(shared))
    return np.concatenate([ids[alone], np.tile(shared, ranks)]), np.concatenate(consumer)


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
