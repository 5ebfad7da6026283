"""Restores a checkpoint into larger tables: old ids have its rows, new ids those they were drawn.

A table's spread order depends on how many rows it has (embedding/layout.py), so rows move when it
grows: each rank reads its block of the saved order and sends the rows to their new owners.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from freescale.embedding.layout import ShardLayout, find_ids, spread_ids
from freescale.embedding.tables import Tables
from freescale.train.state.model import shard_rows
from freescale.transport.api import Transport, gather_json

_AT_ONCE = 1 << 18  # rows of a rank that are on their way together


@dataclass(frozen=True)
class SmallerTable:
    """A table as it was saved, with fewer rows than it has now. `tensors` has this rank's block, or
    all rows of a replicated one: `rows`, and each tensor of their optimizer."""

    name: str
    layout: ShardLayout  # of the saved table alone
    first: int
    last: int
    tensors: dict[str, Tensor]

    @property
    def rows(self) -> int:
        return self.layout.specs[0].rows

    def label_whole(self, transport: Transport) -> dict[str, Tensor]:
        """The tensors as a checkpoint names them; each is whole, over all ranks."""
        return {
            f"table/{self.name}/{part}": shard_rows(value, self.rows, transport)
            if self.layout.world > 1
            else value
            for part, value in self.tensors.items()
        }

    def move(self, tables: Tables) -> None:
        """Copies the rows into the table. A collective if it is sharded."""
        transport, spec = tables.transport, tables.specs[self.name]
        into = tables.get_local_state(self.name)
        now = ShardLayout((spec,), self.layout.world)
        block = now.block(0)
        for begin in range(0, self.layout.block(0), _AT_ONCE):  # as often on every rank
            part = slice(begin, max(begin, min(begin + _AT_ONCE, self.last - self.first)))
            places = torch.arange(self.first + part.start, self.first + part.stop)
            to = spread_ids(find_ids(places, self.rows), spec.rows)
            to, order = to.sort()
            for name, value in self.tensors.items():
                moved = value[part][order.to(value.device)]
                if now.world == 1:
                    self._put(into[name], to, moved)
                    continue
                send = torch.bincount(to // block, minlength=now.world).tolist()
                receive = [sizes[transport.rank] for sizes in gather_json(transport, send)]
                device = transport.device
                places = transport.all_to_all(to.to(device), send, receive, "ids").wait()
                got = transport.all_to_all(moved.to(device), send, receive, "rows").wait()
                self._put(into[name], places - transport.rank * block, got)

    @staticmethod
    def _put(into: Tensor, places: Tensor, rows: Tensor) -> None:
        into.index_copy_(0, places.to(into.device), rows.to(into.device))


def allocate_smaller(tables: Tables, saved: Mapping[str, Any]) -> list[SmallerTable]:
    """Memory for the tables that had fewer rows. `saved`: descriptions of the saved tables."""
    found = []
    for name, spec in tables.specs.items():
        rows = int(saved[name][0])
        if spec.dynamic is not None or rows == spec.rows:
            continue
        replicated = tables.placements[name].kind == "replicated"
        layout = ShardLayout(
            (replace(spec, rows=rows),), 1 if replicated else tables.transport.world
        )
        first, last = layout.get_owned_range(0, 0 if replicated else tables.transport.rank)
        tensors = {
            part: torch.empty(
                (last - first, *value.shape[1:]), dtype=value.dtype, device=value.device
            )
            for part, value in tables.get_local_state(name).items()
        }
        found.append(SmallerTable(name, layout, first, last, tensors))
    return found
