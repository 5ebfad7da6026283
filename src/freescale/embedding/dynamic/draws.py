"""How probable ids are as in-batch negatives, from counts over the batches so far.

A draw is a sample of the batch, then one of its ids: an id of a sample with n of them is worth 1/n,
in integer parts of `SAMPLE`. Each virtual shard sums up what its ids are worth in two rows of
buckets, an id in one of each by its hash, and takes the smaller sum (a count-min sketch). The room
is bounded whatever comes and goes; ids that share both buckets with others look more probable than
they are. Sums are of integers, and shards are those of the table: they depend on the global batches
alone, never on the number of ranks, and what a batch has added can be taken back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

SAMPLE = 1 << 20  # what the ids of a sample are worth together
ROWS = 2  # of buckets; an id is in one bucket of each
MOST_BUCKETS = 1024  # of a row of a shard: 64 MiB over all ranks
_SHARD = 52  # bits of a key below its shard
_HALF = 26  # bits that choose a bucket


@dataclass(frozen=True)
class BatchDraws:
    """What a batch has added."""

    places: Numbers  # [2 * m] among all sums
    worth: Numbers  # [2 * m]


class DrawCounts:
    """Of some virtual shards."""

    def __init__(self, first_shard: int, shards: int, shard_rows: int) -> None:
        """`shard_rows`: rows of the table in each shard; a shard has no more buckets in a row."""
        self._first, self._buckets = first_shard, min(shard_rows, MOST_BUCKETS)
        self.sums = np.zeros((shards, ROWS * self._buckets), np.int64)

    def add(self, keys: Numbers, worth: Numbers) -> BatchDraws:
        """Adds what unique keys [n] (layout.py) are worth in a batch, [n]."""
        some = worth > 0
        places = self._find_places(keys[some])
        draws = BatchDraws(places.reshape(-1), np.tile(worth[some], ROWS))
        self.apply(draws)
        return draws

    def apply(self, draws: BatchDraws) -> None:
        np.add.at(self.sums.reshape(-1), draws.places, draws.worth)

    def take_back(self, draws: BatchDraws) -> None:
        np.subtract.at(self.sums.reshape(-1), draws.places, draws.worth)

    def estimate(self, keys: Numbers) -> NDArray[np.float32]:
        """[n] the log of the probability that a draw is each of keys [n], but for a number that is
        the same for all: a softmax does not see it."""
        sums = self.sums.reshape(-1)[self._find_places(keys)].min(0, initial=1 << 62)
        logs: NDArray[np.float32] = np.log(np.maximum(sums, 1)).astype(np.float32)
        return logs

    def _find_places(self, keys: Numbers) -> Numbers:
        """[2, n] of keys [n]: where their sums are."""
        hashes = keys.view(np.uint64) ^ np.uint64(1 << 63)
        shards = (hashes >> np.uint64(_SHARD)).astype(np.int64) - self._first
        low = np.uint64((1 << _HALF) - 1)
        parts = np.stack([hashes >> np.uint64(_HALF) & low, hashes & low]).astype(np.int64)
        buckets = parts * self._buckets >> _HALF
        rows: Numbers = shards * ROWS + np.arange(ROWS)[:, None]
        return rows * self._buckets + buckets
