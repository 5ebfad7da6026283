"""The lengths and ids of a histories file; the rows of its ids are found by the collision masks of
training. Of many ids it looks at those whose hash falls into a sample, and says how far that may be
off."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.config import SimulateConfig
from freescale.data.loader import Histories
from freescale.embedding.collision import collision_masks
from freescale.embedding.layout import ShardLayout, TableSpec
from freescale.random import derive, hash_name, integers
from freescale.simulate.workload import Demand, Rows


@dataclass(frozen=True)
class _Requests:
    keys: torch.Tensor  # [requests]: owner * size + row
    rank: NDArray[Any]  # [requests]: who asks
    tokens: NDArray[Any]  # [ranks]
    scale: float  # requests that each stands for
    size: int  # rows of an owner


class RecordedWorkload:
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

    def _read(self, step: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(lengths [samples], ids [events])."""
        parts = -(-self.samples // self._size)
        histories = [
            self._data.batch(self._find_full_batch(step * parts + part)).sequences["history"]
            for part in range(parts)
        ]
        lengths = torch.cat([history.lengths for history in histories])[: self.samples]
        return lengths.numpy(), torch.cat([history.values for history in histories])[
            : int(lengths.sum())
        ].numpy()

    def _find_full_batch(self, turn: int) -> int:
        """The number of the batch of this turn, when the smaller one at the end of each epoch is
        left out."""
        epoch, index = divmod(turn, self._data.num_samples // self._size)
        return epoch * self._data.batches_per_epoch + index

    def get_lengths(self, step: int) -> NDArray[Any]:
        return self._batch(step)[0]

    def find_requests(self, step: int, rank_of: NDArray[Any], ranks: int) -> _Requests:
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
        return _Requests(
            torch.from_numpy(both % (layout.size * ranks)),
            both // (layout.size * ranks),
            tokens,
            self._sampled,
            layout.size,
        )

    def compute_demand(
        self, before: _Requests | None, now: _Requests, after: _Requests | None
    ) -> Demand:
        none = torch.zeros_like(now.keys, dtype=torch.bool)
        late = none if before is None else collision_masks(before.keys, now.keys)[1]
        shared = none if after is None else collision_masks(now.keys, after.keys)[0]
        return Demand(*(self._count_rows(now, mask.numpy()) for mask in (~none, late, shared)))

    def _count_rows(self, read: _Requests, mask: NDArray[Any]) -> Rows:
        ranks = len(read.tokens)
        asked = np.bincount(read.rank[mask], minlength=ranks) * float(read.scale)
        if read.scale == 1:
            return Rows(
                asked,
                np.bincount(read.keys.numpy()[mask] // read.size, minlength=ranks).astype(
                    np.float64
                ),
            )
        return Rows.spread(_smooth(asked, read.tokens))

    def describe_error(self, ranks: int) -> str:
        if self._sampled == 1:
            return "rows: of all ids, found by the collision masks of training"
        lengths = self.get_lengths(0)
        error = self.estimate_error(
            self.find_requests(0, np.arange(len(lengths)) * ranks // len(lengths), ranks)
        )
        return (
            f"SAMPLED: rows of one id in {self._sampled}, by its hash; standard error of the "
            f"rows asked for {100 * error:.2f} %"
        )

    def estimate_error(self, read: _Requests) -> float:
        """Standard error of the rows that a step asks for, as a share of them: 0 when all ids are
        looked at."""
        if read.scale == 1:
            return 0.0
        groups = integers(derive(hash_name("groups"), read.keys), 16).numpy()
        counts = np.bincount(groups, minlength=16)
        return float(counts.std(ddof=1) / counts.mean() / 4)


def _smooth(asked: NDArray[Any], tokens: NDArray[Any]) -> NDArray[Any]:
    """Rows a rank asks for as a power of its tokens, fitted over the ranks: a sample of the ids
    makes each rank's own count noisy, and the slowest rank of many would be the noisiest."""
    seen = (asked > 0) & (tokens > 0)
    if seen.sum() < 3 or np.ptp(tokens[seen]) == 0:
        return np.where(tokens > 0, asked[seen].mean() if seen.any() else 0.0, 0.0)
    slope, height = np.polyfit(np.log(tokens[seen]), np.log(asked[seen]), 1)
    fitted = np.where(tokens > 0, np.exp(height + slope * np.log(np.maximum(tokens, 1))), 0.0)
    return np.asarray(fitted * (asked.sum() / fitted.sum()))
