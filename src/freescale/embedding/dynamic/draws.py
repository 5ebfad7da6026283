"""How probable ids are as in-batch negatives, from counts over the batches so far.

A draw is a sample of the batch, then one of its ids: an id of a sample with n of them is worth 1/n,
in integer parts of `SAMPLE`. A table is divided into 4,096 parts by the upper bits of the hash.
Each sums up what its ids are worth in two rows of buckets, an id in one of each by its hash, and
takes the smaller sum (a count-min sketch): ids that share both buckets look more probable than they
are. Integer sums depend on the global batches alone, and can be taken back. They lie where the
table's map does: on a GPU nothing of it comes to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.embedding.dynamic_rules import SHARDS, Dynamic
from freescale.kernels.dispatch.id_map import choose_draw_sums
from freescale.kernels.id_map.buckets import ROWS
from freescale.streams import InTurn

SAMPLE = 1 << 20  # what the ids of a sample are worth together
MOST_BUCKETS = 1024  # of a row of a part: 64 MiB over all ranks
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class BatchDraws:
    """What a batch has added."""

    keys: Tensor  # [n]
    worth: Tensor  # [n]


class DrawCounts:
    """Of some virtual shards. Keys and what they are worth come on the device of the sums."""

    def __init__(
        self, rules: Dynamic, first_shard: int, last_shard: int, device: torch.device = _CPU
    ) -> None:
        """For the shards [first, last). A part has no more buckets in a row than rows."""
        size, parts = ROWS * min(rules.rows // SHARDS, MOST_BUCKETS), SHARDS // rules.shards
        count = (last_shard - first_shard) * parts
        self.sums = torch.zeros(count, size, dtype=torch.int64, device=device)
        self._lowest = first_shard * parts - SHARDS // 2  # as keys begin
        self._kernels = choose_draw_sums(device)
        self._in_turn = InTurn(device)  # lanes count, and the main thread may take back

    def add(self, keys: Tensor, worth: Tensor) -> BatchDraws:
        """Adds what keys [n] (layout.py), as often as they come, are worth in a batch, [n]."""
        draws = BatchDraws(keys.contiguous(), worth.contiguous())
        self.apply(draws)
        return draws

    def apply(self, draws: BatchDraws) -> None:
        with self._in_turn(draws.keys, draws.worth):
            self._kernels.add_draws(self.sums, draws.keys, draws.worth, self._lowest)

    def take_back(self, draws: BatchDraws) -> None:
        with self._in_turn(draws.keys, draws.worth):
            self._kernels.add_draws(
                self.sums, draws.keys, draws.worth, self._lowest, take_back=True
            )

    def estimate(self, keys: Tensor) -> Tensor:
        """[n] float32: the log of the probability that a draw is each of keys [n], but for a number
        that is the same for all: a softmax does not see it."""
        with self._in_turn():
            found: Tensor = self._kernels.estimate_log(self.sums, keys.contiguous(), self._lowest)
        return found

    def end_reading(self) -> None:
        """What was read of `sums` on the current stream is before the next work."""
        with self._in_turn():
            pass
