"""One group of tables that every rank holds whole: it only sums gradients, in `collect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.layout import ShardLayout, TableSpec
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.request import Index, list_ids
from freescale.embedding.rows import FetchedRows
from freescale.embedding.storage.api import Storage, TableRange, UpdateOptions
from freescale.embedding.storage.device import DeviceStorage
from freescale.kernels.dispatch.rows import select_marked_rows
from freescale.transport.api import Transport


@dataclass(frozen=True)
class MarkedRequest:
    """The rows that this rank reads in a step."""

    index: Index
    marks: Tensor  # [size]: 1 for rows that are read, 0 for others, in the dtype of the rows


class ReplicatedRows(FetchedRows):
    """The whole tables."""

    def __init__(
        self, layout: ShardLayout, request: MarkedRequest, rows: Tensor, *, train: bool
    ) -> None:
        super().__init__(request.index, rows, layout.find_rows, train=train)
        self.marks = request.marks

    def _search(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        return keys, self.marks[keys] > 0


class Replicated:
    """Tables that every rank holds whole. Lazy: only rows that some rank read change."""

    def __init__(
        self, specs: Sequence[TableSpec], optimizer: RowOptimizer, transport: Transport
    ) -> None:
        self.layout = ShardLayout(tuple(specs), 1)
        ranges = [
            TableRange(spec, self.layout.base(table), 0, spec.rows)
            for table, spec in enumerate(specs)
        ]
        self.rows: Storage = DeviceStorage(ranges, self.layout.size, optimizer, transport.device)
        self.encoding = specs[0].dtype

    def request(self, batches: Sequence[SequenceBatch], transport: Transport) -> MarkedRequest:
        """Marks the rows that this rank reads."""
        with transport.ledger.span("deduplicate"):
            marks = self.rows.weight.new_zeros(self.layout.size)
            given = list_ids(batches, self.layout.specs).ids
            parts = [self.layout.find_rows(table, ids.reshape(-1)) for table, ids in given]
            places = (
                torch.cat(parts)
                if parts
                else torch.zeros(0, dtype=torch.int64, device=marks.device)
            )
            marks[places] = 1
        return MarkedRequest(Index(places[:0], given, places), marks)

    def fetch(self, request: MarkedRequest, transport: Transport, train: bool) -> ReplicatedRows:
        if train:
            self.rows.begin(transport.ledger)
        return ReplicatedRows(self.layout, request, self.rows.weight, train=train)

    def collect(self, rows: ReplicatedRows, transport: Transport) -> tuple[Tensor, Tensor]:
        """(marks [size], gradients [size, width]), summed over the ranks. A collective."""
        gradient = rows.pop_gradient()
        # One message: gradients, and behind them the marks of the rows that were read.
        joined = torch.cat([gradient.view(-1), rows.marks])
        summed = transport.all_reduce(joined, "gradients").wait()
        return summed[gradient.numel() :], summed[: gradient.numel()].view_as(gradient)

    def update(
        self,
        collected: tuple[Tensor, Tensor],
        transport: Transport,
        **options: Unpack[UpdateOptions],
    ) -> None:
        with transport.ledger.span("update rows"):
            rows, gradients = select_marked_rows(*collected)
            self.rows.update(rows, gradients, **options)
