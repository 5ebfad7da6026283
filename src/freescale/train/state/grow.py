"""Restores a checkpoint into larger tables: old ids have its rows, new ids those they were drawn.

A table's spread order depends on how many rows it has (embedding/layout.py), so rows move when it
grows: each rank reads its block of the saved order and sends the rows to their new owners.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from freescale.embedding.layout import ShardLayout, find_ids, spread_ids
from freescale.embedding.tables import Tables
from freescale.train.state.model import shard_rows
from freescale.transport.api import gather_json

_AT_ONCE = 1 << 18  # rows of a rank that are on their way together


class SmallerTable:
    """A table as it was saved, with fewer rows than it has now. `tensors` has positions [first,
    last), this rank's or all of a replicated one: `rows`, and each tensor of their optimizer."""

    def __init__(self, name: str, rows: int, tables: Tables) -> None:
        self.name, self._rows, self._tables = name, rows, tables
        transport, whole = tables.transport, tables.placements[name].kind == "replicated"
        self._world, self._rank = (1, 0) if whole else (transport.world, transport.rank)
        layout = ShardLayout((replace(tables.specs[name], rows=rows),), self._world)
        self.first, self.last = layout.get_owned_range(0, self._rank)
        self._block = layout.block(0)
        self.tensors = {
            part: value.new_empty((self.last - self.first, *value.shape[1:]))
            for part, value in tables.get_local_state(name).items()
        }

    def label_whole(self) -> dict[str, Tensor]:
        """The tensors as a checkpoint names them; each is whole, over all ranks."""
        found = {f"table/{self.name}/{part}": value for part, value in self.tensors.items()}
        if self._world == 1:
            return found
        transport = self._tables.transport
        return {name: shard_rows(value, self._rows, transport) for name, value in found.items()}

    def move(self) -> None:
        """Copies the rows into the table. A collective if it is sharded."""
        spec, into = self._tables.specs[self.name], self._tables.get_local_state(self.name)
        block = -(-spec.rows // self._world)
        for begin in range(0, self._block, _AT_ONCE):  # as often on every rank
            part = slice(begin, max(begin, min(begin + _AT_ONCE, self.last - self.first)))
            old = torch.arange(self.first + part.start, self.first + part.stop)
            places, order = spread_ids(find_ids(old, self._rows), spec.rows).sort()
            counts = torch.bincount(places // block, minlength=self._world).tolist()
            own = self._exchange(places, counts, "ids") - self._rank * block
            for name, value in self.tensors.items():
                rows = self._exchange(value[part][order.to(value.device)], counts, "rows")
                into[name].index_copy_(0, own.to(value.device), rows.to(value.device))

    def _exchange(self, rows: Tensor, send: list[int], kind: str) -> Tensor:
        if self._world == 1:
            return rows
        transport = self._tables.transport
        receive = [sizes[self._rank] for sizes in gather_json(transport, send)]
        return transport.all_to_all(rows.to(transport.device), send, receive, kind).wait()
