"""The blocking exchange of one group of tables: what a batch reads is fetched, its gradients go back to the owners.

    request   deduplicate ids, AllToAll the split sizes and the ids           (kind: ids)
    fetch     owners look up, AllToAll the rows                               (kind: rows)
    apply     AllToAll the gradients, sum duplicates in rank order, update    (kind: gradients)

A replicated group has the same three verbs; its only traffic is one AllReduce in `apply`. Everything runs on the caller's thread
and stream, over the transport that the group was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.layout import Layout, TableSpec, announced_ids, positions
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.table import Rows, Segment
from freescale.kernels.rows import gather_rows, sum_duplicates
from freescale.transport.api import Transport

# A batch's ids of one group: (table index within the group, the batch's own tensor of ids).
Announced = Sequence[tuple[int, Tensor]]


class Index:
    """Finds the fetched row of an id: by identity for the tensors that were announced, else by search."""

    def __init__(self, keys: Tensor, announced: Announced, inverse: Tensor) -> None:
        self.keys = keys  # [u] sorted
        parts = inverse.split([ids.numel() for _, ids in announced])
        self._known = [(table, ids, ids._version, part) for (table, ids), part in zip(announced, parts, strict=True)]

    def known(self, table: int, ids: Tensor) -> Tensor | None:
        for owner, tensor, version, part in self._known:
            same = tensor is ids or (tensor.data_ptr() == ids.data_ptr() and tensor.numel() == ids.numel() > 0)
            same = same and tensor.is_contiguous()
            if same and owner == table and ids._version == version and ids.is_contiguous() and ids.dtype == tensor.dtype:
                return part.view(ids.shape)
        return None

    def search(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """keys [...] -> (index of the fetched row, whether it was fetched)."""
        if not self.keys.numel():
            return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
        found = torch.searchsorted(self.keys, keys).clamp_(max=self.keys.numel() - 1)
        return found, self.keys[found] == keys


@dataclass
class Request:
    """What one rank reads of a group in one step."""

    index: Index
    send: list[int]  # requests to each owner
    receive: list[int]  # requests from each rank
    owned: Tensor  # [sum(receive)] local rows asked of this rank, in rank order
    rows: Tensor | None = None  # [u, width], a leaf of autograd


def _ids(batches: Sequence[SequenceBatch], spec: TableSpec) -> list[Tensor]:
    return [ids for batch in batches for _, ids in announced_ids(batch, spec)]


class Sharded:
    """A group of tables, sharded by row over the ranks."""

    def __init__(self, specs: Sequence[TableSpec], optimizer: RowOptimizer, transport: Transport) -> None:
        self.layout = Layout(tuple(specs), transport.world)
        self.transport = transport
        segments = [
            Segment(spec, self.layout.base(table), *self.layout.owned(table, transport.rank)) for table, spec in enumerate(specs)
        ]
        self.rows = Rows(segments, self.layout.size, optimizer, transport.device)
        self._wire = torch.int32 if self.layout.size < 1 << 31 else torch.int64
        edges = torch.arange(1, transport.world + 1, device=transport.device) * self.layout.size
        self._edges = edges
        self._last_read: Tensor | None = None

    def request(self, batches: Sequence[SequenceBatch]) -> Request:
        ledger, transport = self.transport.ledger, self.transport
        with ledger.span("deduplicate"):
            announced = [(table, ids) for table, spec in enumerate(self.layout.specs) for ids in _ids(batches, spec)]
            parts = [self.layout.keys(table, ids.reshape(-1)) for table, ids in announced]
            keys = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=transport.device)
            unique, inverse = torch.unique(keys, return_inverse=True)
            bounds = torch.searchsorted(unique, self._edges)  # [world]: end of each owner's part
            counts = torch.diff(bounds, prepend=bounds.new_zeros(1))
        ones = [1] * transport.world
        asked = transport.all_to_all(counts, ones, ones, "ids").wait()
        send, receive = torch.stack([counts, asked]).tolist()
        local = (unique % self.layout.size).to(self._wire)
        owned = transport.all_to_all(local, send, receive, "ids").wait().long()
        return Request(Index(unique, announced, inverse), send, receive, owned)

    def fetch(self, request: Request, train: bool) -> None:
        with self.transport.ledger.span("lookup"):
            found = gather_rows(self.rows.weight, request.owned)
        rows = self.transport.all_to_all(found, request.receive, request.send, "rows").wait()
        request.rows = rows.detach().requires_grad_(train)

    def apply(self, request: Request, *, step: int, factor: float, clip: float | None) -> None:
        assert request.rows is not None
        gradient = request.rows.grad if request.rows.grad is not None else torch.zeros_like(request.rows)
        request.rows = None  # its memory is free for the gradients that come in
        received = self.transport.all_to_all(gradient, request.send, request.receive, "gradients").wait()
        del gradient
        with self.transport.ledger.span("update rows"):
            rows, summed = sum_duplicates(request.owned, received)
            self.rows.update(rows, summed, step=step, factor=factor, clip=clip)
        self._last_read = rows

    def collisions(self, request: Request) -> tuple[int, Tensor | int]:
        """(requests at this owner, those whose row the last step read too)."""
        total = request.owned.numel()
        if self._last_read is None or not total or not self._last_read.numel():
            return total, 0
        found = torch.searchsorted(self._last_read, request.owned).clamp_(max=self._last_read.numel() - 1)
        return total, (self._last_read[found] == request.owned).sum()

    def read(self, request: Request, table: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(rows to index, index [...], found [...] or None if all are known to be there)."""
        assert request.rows is not None
        index = request.index.known(table, ids)
        if index is not None:
            return request.rows, index, None
        found, there = request.index.search(self.layout.keys(table, ids))
        return request.rows, found, there


class Replicated:
    """A group of tables that every rank holds whole. Lazy like the sharded ones: only rows that some rank read change."""

    def __init__(self, specs: Sequence[TableSpec], optimizer: RowOptimizer, transport: Transport) -> None:
        self.layout = Layout(tuple(specs), 1)
        self.transport = transport
        segments = [Segment(spec, self.layout.base(table), 0, spec.rows) for table, spec in enumerate(specs)]
        self.rows = Rows(segments, self.layout.size, optimizer, transport.device)

    def request(self, batches: Sequence[SequenceBatch]) -> Request:
        """Marks the rows that this rank reads. `owned` holds the marks [size]."""
        with self.transport.ledger.span("deduplicate"):
            marks = self.rows.weight.new_zeros(self.layout.size)
            for table, spec in enumerate(self.layout.specs):
                for ids in _ids(batches, spec):
                    marks[self.layout.keys(table, ids.reshape(-1))] = 1
        empty = torch.zeros(0, dtype=torch.int64, device=marks.device)
        return Request(Index(empty, [], empty), [], [], marks)

    def fetch(self, request: Request, train: bool) -> None:
        request.rows = self.rows.weight.detach().requires_grad_(train)

    def apply(self, request: Request, *, step: int, factor: float, clip: float | None) -> None:
        assert request.rows is not None
        gradient = request.rows.grad if request.rows.grad is not None else torch.zeros_like(request.rows)
        request.rows = None
        # One message: gradients, and behind them the marks of the rows that were read.
        joined = torch.cat([gradient.view(-1), request.owned])
        summed = self.transport.all_reduce(joined, "gradients").wait()
        with self.transport.ledger.span("update rows"):
            rows = summed[gradient.numel() :].nonzero().squeeze(1)
            gradients = summed[: gradient.numel()].view_as(gradient).index_select(0, rows)
            self.rows.update(rows, gradients, step=step, factor=factor, clip=clip)

    def collisions(self, request: Request) -> tuple[int, int]:
        """Replicated rows are never requested."""
        return 0, 0

    def read(self, request: Request, table: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        assert request.rows is not None
        index = positions(ids, self.layout.specs[table].rows) + self.layout.base(table)
        return request.rows, index, request.owned[index] > 0
