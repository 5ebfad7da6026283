"""One group of tables that every rank holds whole: nothing is requested. Its only traffic is the
AllReduce of gradients in `apply`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.layout import ShardLayout, TableSpec, spread_ids
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.request import Index, Request, RequestPart, collect_ids
from freescale.embedding.storage import DeviceStorage, RowStorage, TableRange, UpdateOptions
from freescale.kernels.dispatch.rows import select_marked_rows
from freescale.transport.api import Transport


class Replicated:
    """A group of tables that every rank holds whole. Lazy like the sharded ones: only rows that
    some rank read change."""

    def __init__(
        self, specs: Sequence[TableSpec], optimizer: RowOptimizer, transport: Transport
    ) -> None:
        self.layout = ShardLayout(tuple(specs), 1)
        ranges = [
            TableRange(spec, self.layout.base(table), 0, spec.rows)
            for table, spec in enumerate(specs)
        ]
        self.rows: RowStorage = DeviceStorage(ranges, self.layout.size, optimizer, transport.device)

    def request(self, batches: Sequence[SequenceBatch], transport: Transport) -> Request:
        """Marks the rows that this rank reads. `owned` holds the marks [size]."""
        with transport.ledger.span("deduplicate"):
            marks = self.rows.weight.new_zeros(self.layout.size)
            given = collect_ids(batches, self.layout.specs)
            parts = [self._locate(table, ids.reshape(-1)) for table, ids in given]
            places = (
                torch.cat(parts)
                if parts
                else torch.zeros(0, dtype=torch.int64, device=marks.device)
            )
            marks[places] = 1
        return Request(Index(places[:0], given, places), RequestPart(None, None, [], []), marks)

    def _locate(self, table: int, ids: Tensor) -> Tensor:
        return spread_ids(ids, self.layout.specs[table].rows) + self.layout.base(table)

    def fetch(self, request: Request, transport: Transport, train: bool) -> None:
        request.open(self.rows.weight, train)

    def apply(
        self, request: Request, transport: Transport, **options: Unpack[UpdateOptions]
    ) -> None:
        """Sends the gradient of the request's rows and updates the tables. A collective."""
        gradient = request.take_gradient()
        # One message: gradients, and behind them the marks of the rows that were read.
        joined = torch.cat([gradient.view(-1), request.owned])
        summed = transport.all_reduce(joined, "gradients").wait()
        with transport.ledger.span("update rows"):
            rows, gradients = select_marked_rows(
                summed[gradient.numel() :], summed[: gradient.numel()].view_as(gradient)
            )
            self.rows.update(rows, gradients, **options)

    def count_collisions(self, request: Request) -> tuple[int, int]:
        """Replicated rows are never requested."""
        return 0, 0

    def locate(
        self, request: Request, table: int, ids: Tensor
    ) -> tuple[int | None, Tensor, Tensor | None]:
        """As `Sharded.locate`."""
        known = request.index.find_known(table, ids)
        if known is not None:
            return *known, None
        index = self._locate(table, ids)
        return None, index, request.owned[index] > 0
