"""The groups of all tables, and the verbs of a step over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.groups.local import LocalGroup, Replicated
from freescale.embedding.groups.sharded import Sharded
from freescale.embedding.host_tables.tiers import Tier
from freescale.embedding.layout import Layout, TableSpec
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.placement import Placement
from freescale.embedding.request import Requested
from freescale.embedding.storage.api import Storage, UpdateOptions
from freescale.transport.api import Transport


class TableGroup(Protocol):
    """Tables of one width, dtype and optimizer, on all ranks. `Any` is what the group's own verb
    before it has returned. All verbs run on the caller's thread and stream; the first three are
    collectives over `transport`, if there is anything to exchange."""

    @property
    def layout(self) -> Layout: ...
    @property
    def rows(self) -> Storage: ...

    def request(self, batches: Sequence[SequenceBatch], transport: Transport) -> Any:
        """What some (micro-)batches read."""

    def fetch(self, request: Any, transport: Transport, train: bool) -> Any:
        """The requested rows, as `Rows`, for the model. With `train`, their step begins."""

    def collect(self, rows: Any, transport: Transport) -> Any:
        """The gradients of what has read the rows. Nothing can be read any more."""

    def update(
        self, collected: Any, transport: Transport, **options: Unpack[UpdateOptions]
    ) -> None:
        """Updates the rows by these gradients."""


class TablePlace(NamedTuple):
    """Where a table is."""

    group: int
    table: int  # within the group


class TableSet:
    """Groups of tables. Each verb takes what the one before it has returned, one for each group."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.sharded: list[Sharded] = []
        self.replicated: list[Replicated] = []
        self.groups: list[TableGroup] = []  # all, the sharded ones first
        self.places: dict[str, TablePlace] = {}  # by table

    def request(
        self, batches: Sequence[SequenceBatch], transport: Transport | None = None
    ) -> list[Any]:
        """What some (micro-)batches read. A collective, over `transport` if it is given."""
        through = transport or self._transport
        return [group.request(batches, through) for group in self.groups]

    def fetch(self, requests: Sequence[Any], train: bool = True) -> list[Any]:
        """The requested rows, as `Rows`. A collective."""
        pairs = zip(self.groups, requests, strict=True)
        return [group.fetch(request, self._transport, train) for group, request in pairs]

    def collect(self, rows: Sequence[Any]) -> list[Any]:
        """The gradients of what has read the rows. A collective."""
        pairs = zip(self.groups, rows, strict=True)
        return [group.collect(one, self._transport) for group, one in pairs]

    def update(
        self, collected: Sequence[Any], *, step: int, factor: float = 1.0, clip: float | None
    ) -> None:
        """Updates the rows by their gradients."""
        for group, one in zip(self.groups, collected, strict=True):
            group.update(one, self._transport, step=step, factor=factor, clip=clip)

    def apply(
        self, rows: Sequence[Any], *, step: int, factor: float = 1.0, clip: float | None
    ) -> None:
        """`collect` and `update`, with one group's gradients in memory at a time. A collective."""
        for group, one in zip(self.groups, rows, strict=True):
            collected = group.collect(one, self._transport)
            group.update(collected, self._transport, step=step, factor=factor, clip=clip)

    def count_collisions(self, requests: Sequence[Requested]) -> tuple[int, Tensor | int]:
        """Of sharded groups: (requests at this owner, those whose row the last step read too)."""
        pairs = zip(self.sharded, requests, strict=False)
        counts = [group.count_collisions(request) for group, request in pairs]
        return sum(total for total, _ in counts), sum(hit for _, hit in counts)


def open_tables(
    specs: Sequence[TableSpec],
    optimizers: Mapping[str, RowOptimizer],
    placements: Mapping[str, Placement],
    transport: Transport,
    wire: torch.dtype | None,
    exchange: str,
) -> TableSet:
    """Allocates the rows of all tables, without values. Tables of one width, dtype, optimizer and
    placement make a group; a dynamic table is alone in its group."""
    Key = tuple[Tier | None, int, torch.dtype, RowOptimizer, str | None]
    kinds: dict[str, dict[Key, list[TableSpec]]] = {"sharded": {}, "replicated": {}}
    for spec in specs:
        placed = placements[spec.name]
        alone = spec.name if spec.dynamic is not None else None
        key = (placed.tier, spec.width, spec.dtype, optimizers[spec.name], alone)
        kinds[placed.kind].setdefault(key, []).append(spec)
    tables = TableSet(transport)
    for (tier, _, _, optimizer, _), together in kinds["sharded"].items():
        tables.sharded.append(Sharded(together, optimizer, transport, wire, tier, exchange))
    for (_, _, _, optimizer, _), together in kinds["replicated"].items():
        tables.replicated.append(Replicated(together, optimizer, transport))
    tables.groups = [*tables.sharded, *tables.replicated]
    lists = [*kinds["sharded"].values(), *kinds["replicated"].values()]
    tables.places = {
        spec.name: TablePlace(group, table)
        for group, together in enumerate(lists)
        for table, spec in enumerate(together)
    }
    return tables


def open_locally(tables: TableSet, transport: Transport) -> TableSet:
    """The same tables as a single rank reads them: in place, without exchange."""
    assert transport.world == 1
    local = TableSet(transport)
    shared: list[Sharded | Replicated] = [*tables.sharded, *tables.replicated]
    local.groups = [LocalGroup(group.layout, group.rows, group.encoding) for group in shared]
    local.places = tables.places
    return local
