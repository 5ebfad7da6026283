"""How probable ids are as in-batch negatives, from counts over the batches so far.

A draw is a sample of the batch, then one of its ids: an id of a sample with n of them is worth 1/n,
in integer parts of `SAMPLE`. Each virtual shard sums up what its ids are worth in two rows of
buckets, an id in one of each by its hash, and takes the smaller sum (a count-min sketch). The room
is bounded whatever comes and goes; ids that share both buckets with others look more probable than
they are. Sums are of integers, and shards are those of the table: they depend on the global batches
alone, never on the number of ranks, and what a batch has added can be taken back. They lie where
the table's map does: on a GPU nothing of it comes to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.embedding.dynamic_rules import SHARDS
from freescale.streams import InTurn

SAMPLE = 1 << 20  # what the ids of a sample are worth together
ROWS = 2  # of buckets; an id is in one bucket of each
MOST_BUCKETS = 1024  # of a row of a shard: 64 MiB over all ranks
_SHARD = 52  # bits of a key below its shard
_HALF = 26  # bits that choose a bucket
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class BatchDraws:
    """What a batch has added."""

    places: Tensor  # [2 * n] among all sums
    worth: Tensor  # [2 * n]


class DrawCounts:
    """Of some virtual shards. Keys and what they are worth come on the device of the sums."""

    def __init__(
        self,
        first_shard: int,
        shards: int,
        shard_rows: int,
        device: torch.device = _CPU,
    ) -> None:
        """`shard_rows`: rows of the table in each shard; a shard has no more buckets in a row."""
        self._first, self._buckets = first_shard, min(shard_rows, MOST_BUCKETS)
        self.sums = torch.zeros(shards, ROWS * self._buckets, dtype=torch.int64, device=device)
        self._rows = torch.arange(ROWS, device=device)[:, None]
        self._in_turn = InTurn(device)  # lanes count, and the main thread may take back

    def add(self, keys: Tensor, worth: Tensor) -> BatchDraws:
        """Adds what keys [n] (layout.py), as often as they come, are worth in a batch, [n]."""
        with self._in_turn():
            draws = BatchDraws(self._find_places(keys).view(-1), worth.repeat(ROWS))
        self.apply(draws)
        return draws

    def apply(self, draws: BatchDraws) -> None:
        with self._in_turn(draws.places, draws.worth):
            self.sums.view(-1).index_add_(0, draws.places, draws.worth)

    def take_back(self, draws: BatchDraws) -> None:
        with self._in_turn(draws.places, draws.worth):
            self.sums.view(-1).index_add_(0, draws.places, draws.worth, alpha=-1)

    def estimate(self, keys: Tensor) -> Tensor:
        """[n] float32: the log of the probability that a draw is each of keys [n], but for a number
        that is the same for all: a softmax does not see it."""
        with self._in_turn():
            sums = self.sums.view(-1)[self._find_places(keys)].amin(0)
        return sums.clamp(min=1).double().log().float()

    def end_reading(self) -> None:
        """What was read of `sums` on the current stream is before the next work."""
        with self._in_turn():
            pass

    def _find_places(self, keys: Tensor) -> Tensor:
        """[2, n] of keys [n]: where their sums are."""
        shards = (keys >> _SHARD) + (SHARDS // 2 - self._first)
        low = (1 << _HALF) - 1
        parts = torch.stack([(keys >> _HALF) & low, keys & low])
        return (shards * ROWS + self._rows) * self._buckets + ((parts * self._buckets) >> _HALF)
