"""Where a row lives. Pure integer arithmetic: id -> position -> (owner, local row), and back.

Popular items often have small or neighbouring ids, and one rank would own them all if ids were cut
into blocks. So a table is kept in a *spread* order that does not depend on the number of ranks,
position = id * stride mod rows, and that order is cut into equal blocks. Neighbouring ids land on
different ranks, and a checkpoint is one plain array whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.dynamic_rules import Dynamic
from freescale.kernels.row_sums import triton as triton_row_sums
from freescale.random import mix

_SIGN = -(1 << 63)
_LAST = (1 << 63) - 1  # the largest key


@dataclass(frozen=True)
class TableSpec:
    name: str
    rows: int
    width: int
    dtype: torch.dtype
    features: tuple[str, ...]  # batch features that read this table
    padding: int | None = None
    dynamic: Dynamic | None = None  # rows come and go; `rows` is how many there is room for

    @property
    def bytes_per_row(self) -> int:
        return self.width * self.dtype.itemsize


def find_feature_ids(
    batch: SequenceBatch, spec: TableSpec, *, strict: bool = False
) -> list[tuple[str, Tensor]]:
    """(feature, its ids) for each of the table's features that the batch has. `strict` refuses a
    batch that lacks one, as a training batch must not."""
    if not len(batch):
        return []
    present = [f for f in spec.features if strict or f in batch]
    return [(feature, batch.values(feature)) for feature in present]


def choose_stride(rows: int) -> int:
    """A multiplier coprime with `rows`, near the golden section, whose products fit in int64."""
    limit = max(1, min(rows, (1 << 62) // max(rows, 1)))
    stride = max(1, int(limit * 0.6180339887498949))
    while math.gcd(stride, rows) != 1:
        stride += 1
    return stride


def spread_ids(ids: Tensor, rows: int) -> Tensor:
    """ids [...] -> their positions [...] in the spread order of a table with `rows` rows."""
    return ids.long() * choose_stride(rows) % rows  # int32 ids would overflow


def find_ids(position: Tensor, rows: int) -> Tensor:
    """The inverse of `spread_ids`; in two halves: its stride may be as large as `rows`."""
    inverse = pow(choose_stride(rows), -1, rows) if rows > 1 else 0
    if rows <= 1 << 31:
        return position * inverse % rows
    high, low = inverse >> 20, inverse & ((1 << 20) - 1)
    return (position * (high % rows) % rows * (1 << 20) + position * low) % rows


class Layout(Protocol):
    """Where the rows of a group's tables are: of a fixed size (`ShardLayout`), or dynamic."""

    @property
    def specs(self) -> Sequence[TableSpec]: ...
    @property
    def world(self) -> int: ...
    @property
    def size(self) -> int:
        """Local rows of every rank."""

    @property
    def local_dtype(self) -> torch.dtype:
        """The dtype in which local rows travel."""

    def base(self, table: int) -> int:
        """First local row of a table."""

    def get_owned_range(self, table: int, rank: int) -> tuple[int, int]:
        """[first, last) positions of a table that a rank owns."""

    def compute_keys(self, table: int, ids: Tensor) -> Tensor:
        """ids [n] -> keys [n]. Sorted keys are grouped by owner."""

    def find_local(self, keys: Tensor) -> Tensor:
        """keys [n] -> local rows [n] at their owners."""

    def find_rows(self, table: int, ids: Tensor) -> Tensor:
        """ids [n] -> local rows [n], if one rank owns all."""

    def list_rows(self, ids: Sequence[tuple[int, Tensor]], device: torch.device) -> Tensor:
        """(table, ids) -> their local rows [n], on a device with Triton, if one rank owns all."""

    def list_edges(self, device: torch.device) -> Tensor:
        """[world]: keys of rank r are below edge r."""

    def count_owned(self, keys: Tensor, below: Tensor) -> Tensor:
        """[world]: different keys of each rank among keys [n]; `below` [world] is how many are
        below its edge, and not below that of the rank before."""


@dataclass(frozen=True)
class ShardLayout:
    """Tables of one group over `world` ranks; a key is owner * size + local row."""

    specs: tuple[TableSpec, ...]
    world: int

    def block(self, table: int) -> int:
        """Rows of one table on each rank (the last ranks may own fewer)."""
        return -(-self.specs[table].rows // self.world)

    def base(self, table: int) -> int:
        return sum(self.block(t) for t in range(table))

    @property
    def size(self) -> int:
        return self.base(len(self.specs))

    def compute_keys(self, table: int, ids: Tensor) -> Tensor:
        rows, block = self.specs[table].rows, self.block(table)
        if ids.is_cpu:  # by numpy: of a few ids, torch's calls would take most of the time
            place = ids.numpy().astype(np.int64)
            place *= choose_stride(rows)
            place -= place // rows * rows
            place += place // block * (self.size - block) + self.base(table)
            return torch.from_numpy(place)
        position = spread_ids(ids, rows)
        owner = position // block
        return owner * (self.size - block) + position + self.base(table)

    @property
    def local_dtype(self) -> torch.dtype:
        return torch.int32 if self.size < 1 << 31 else torch.int64

    def find_local(self, keys: Tensor) -> Tensor:
        if keys.is_cpu:
            numbers = keys.numpy()
            return torch.from_numpy(numbers - numbers // self.size * self.size)
        return keys % self.size

    def find_rows(self, table: int, ids: Tensor) -> Tensor:
        return spread_ids(ids, self.specs[table].rows) + self.base(table)

    def list_rows(self, ids: Sequence[tuple[int, Tensor]], device: torch.device) -> Tensor:
        """By one kernel for each table."""
        sizes = [each.numel() for _, each in ids]
        rows = torch.empty(sum(sizes), dtype=self.local_dtype, device=device)
        begin = 0
        for table, spec in enumerate(self.specs):
            parts = [each.reshape(-1) for owner, each in ids if owner == table]
            if not parts:
                continue
            joined = torch.cat(parts) if len(parts) > 1 else parts[0]
            end = begin + joined.numel()
            stride = choose_stride(spec.rows)
            triton_row_sums.spread_ids(joined, rows[begin:end], stride, spec.rows, self.base(table))
            begin = end
        return rows

    def count_owned(self, keys: Tensor, below: Tensor) -> Tensor:
        return below

    def list_edges(self, device: torch.device) -> Tensor:
        return torch.arange(1, self.world + 1, device=device) * self.size

    def get_owned_range(self, table: int, rank: int) -> tuple[int, int]:
        block, rows = self.block(table), self.specs[table].rows
        return min(rank * block, rows), min((rank + 1) * block, rows)


def compute_keys(ids: Tensor) -> Tensor:
    """ids [...] -> keys [...]."""
    return mix(ids.long()).bitwise_xor_(_SIGN)


@dataclass(frozen=True)
class DynamicLayout:
    """A dynamic table over `world` ranks.

    A key is the id's hash, a bijection of 64 bits, ordered as a signed number. Its upper bits are
    the virtual shard, 12 of them in a large table, and ranks own contiguous ranges of shards:
    sorted keys are grouped by owner, and within it by shard. If there are more ranks than shards,
    the last ones own nothing. Row r of a shard has position shard * rows of a shard + r in the
    table, whatever the number of ranks, so that a checkpoint is one plain array.
    """

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
        return torch.int64  # type of keys: only the owner knows the rows

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
