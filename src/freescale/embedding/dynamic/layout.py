"""Where an id of a dynamic table belongs. Pure integer arithmetic.

A key is the id's hash, a bijection of 64 bits, ordered as a signed number. Its upper bits are the
virtual shard, 12 of them in a large table, and ranks own contiguous ranges of shards: sorted keys
are grouped by owner, and within it by shard. If there are more ranks than shards, the last ones own
nothing. Row number r of a shard has position shard * rows of a shard + r in the table, whatever the
number of ranks, so that a checkpoint is one plain array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.embedding.dynamic_rules import Dynamic
from freescale.embedding.layout import TableSpec
from freescale.random import mix

_SIGN = -(1 << 63)
_LAST = (1 << 63) - 1  # the largest key


def compute_keys(ids: Tensor) -> Tensor:
    """ids [...] -> keys [...]."""
    return mix(ids.long()).bitwise_xor_(_SIGN)


@dataclass(frozen=True)
class DynamicLayout:
    """A dynamic table over `world` ranks."""

    specs: tuple[TableSpec]
    world: int

    @property
    def rules(self) -> Dynamic:
        rules = self.specs[0].dynamic
        assert rules is not None
        return rules

    @property
    def _block(self) -> int:
        """Shards of each rank (the last ranks may own fewer)."""
        return -(-self.rules.shards // self.world)

    @property
    def size(self) -> int:
        """Most rows of a rank."""
        return self._block * self.rules.shard_rows

    def base(self, table: int) -> int:
        return 0

    def get_owned_shards(self, rank: int) -> tuple[int, int]:
        """[first, last) shards of a rank."""
        shards = self.rules.shards
        return min(rank * self._block, shards), min((rank + 1) * self._block, shards)

    def get_owned_range(self, table: int, rank: int) -> tuple[int, int]:
        first, last = self.get_owned_shards(rank)
        return first * self.rules.shard_rows, last * self.rules.shard_rows

    def compute_keys(self, table: int, ids: Tensor) -> Tensor:
        return compute_keys(ids)

    @property
    def local_dtype(self) -> torch.dtype:
        return torch.int64  # of keys: only the owner knows the rows

    def find_local(self, keys: Tensor) -> Tensor:
        return keys

    def find_rows(self, table: int, ids: Tensor) -> Tensor:
        return compute_keys(ids)

    def list_rows(self, ids: Sequence[tuple[int, Tensor]], device: torch.device) -> Tensor:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return compute_keys(torch.cat([none, *(each.reshape(-1) for _, each in ids)]))

    def list_edges(self, device: torch.device) -> Tensor:
        """The largest key of all is below none, see `count_owned`."""
        shards = [self.get_owned_shards(rank)[1] for rank in range(self.world)]
        bits, all_shards = self.rules.shard_bits, self.rules.shards
        edges = [(shard << bits) + _SIGN if shard < all_shards else _LAST for shard in shards]
        return torch.tensor(edges, dtype=torch.int64, device=device)

    def count_owned(self, keys: Tensor, below: Tensor) -> Tensor:
        last = self.rules.shards
        owner = next(r for r in range(self.world) if self.get_owned_shards(r)[1] == last)
        above = torch.zeros_like(below)
        above[owner] = (keys == _LAST).any()
        return below + above
