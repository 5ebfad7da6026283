"""The exchange of one group of tables: what a batch reads is fetched, its gradients go back to the owners.

    request    deduplicate ids, AllToAll the split sizes and the ids                         (kind: ids)
    compare    owners tell the requesters which rows two consecutive batches share           (kind: ids)
    look_up    owners look up some of the rows, AllToAll them                                (kind: rows)
    send       AllToAll some of the gradients                                                (kind: gradients)
    update     sum duplicates in rank order, update the rows

`fetch` and `apply` are the blocking forms, over all rows: the serial schedule needs no others. A replicated group has these two;
its only traffic is one AllReduce in `apply`. Everything runs on the caller's thread and stream, over the transport it passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.collision import collision_masks, counts_per_rank
from freescale.embedding.layout import Layout, TableSpec, announced_ids, positions
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.table import Rows, Segment
from freescale.kernels.rows import gather_rows, sum_duplicates
from freescale.transport.api import Handle, Transport

# A batch's ids of one group: (table index within the group, the batch's own tensor of ids).
Announced = Sequence[tuple[int, Tensor]]
# (rows asked by the current batch, by the coming one) -> (which of the current ones are shared, which of the coming ones collide)
Masks = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


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


@dataclass(frozen=True)
class Part:
    """Some of a request's rows, and where they travel."""

    mine: Tensor | None  # [sum(send)] positions among this rank's rows, by owner; None: all
    theirs: Tensor | None  # [sum(receive)] positions among the rows asked of this rank, in rank order; None: all
    send: list[int]  # of `mine`, owned by each rank
    receive: list[int]  # of `theirs`, asked by each rank


@dataclass
class Request:
    """What one rank reads of a group in one step."""

    index: Index
    whole: Part
    owned: Tensor  # [sum(receive)] local rows asked of this rank, in rank order
    rows: Tensor | None = None  # [u, width], a leaf of autograd
    early: Part | None = None  # rows that the batch before does not read
    late: Part | None = None  # rows that it does: they collide, and come after its update
    shared: Part | None = None  # rows that the batch after reads too: their gradients go first
    rest: Part | None = None  # rows that it does not: their gradients can wait

    def gradient(self) -> Tensor:
        """Of the rows [u, width]. Gives the rows and their gradient away: their memory is the caller's."""
        assert self.rows is not None
        gradient = self.rows.grad if self.rows.grad is not None else torch.zeros_like(self.rows)
        self.rows = None
        return gradient


def _ids(batches: Sequence[SequenceBatch], spec: TableSpec) -> list[Tensor]:
    return [ids for batch in batches for _, ids in announced_ids(batch, spec)]


def _split(mine: Tensor, theirs: Tensor, send: list[int], receive: list[int], whole: Part) -> tuple[Part, Part]:
    """(the part that the masks select, the rest)."""
    chosen = Part(mine.nonzero().squeeze(1), theirs.nonzero().squeeze(1), send, receive)
    left = [[a - b for a, b in zip(all_of, some, strict=True)] for all_of, some in ((whole.send, send), (whole.receive, receive))]
    return chosen, Part((~mine).nonzero().squeeze(1), (~theirs).nonzero().squeeze(1), *left)


class Sharded:
    """A group of tables, sharded by row over the ranks."""

    def __init__(self, specs: Sequence[TableSpec], optimizer: RowOptimizer, transport: Transport) -> None:
        self.layout = Layout(tuple(specs), transport.world)
        segments = [
            Segment(spec, self.layout.base(table), *self.layout.owned(table, transport.rank)) for table, spec in enumerate(specs)
        ]
        self.rows = Rows(segments, self.layout.size, optimizer, transport.device)
        self._wire = torch.int32 if self.layout.size < 1 << 31 else torch.int64
        edges = torch.arange(1, transport.world + 1, device=transport.device) * self.layout.size
        self._edges = edges
        self._last_read: Tensor | None = None

    def request(self, batches: Sequence[SequenceBatch], transport: Transport) -> Request:
        with transport.ledger.span("deduplicate"):
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
        return Request(Index(unique, announced, inverse), Part(None, None, send, receive), owned)

    def compare(self, current: Request, coming: Request, transport: Transport, masks: Masks) -> None:
        """Splits both requests by what they share: `shared` and `rest` of the current one, `early` and `late` of the coming."""
        with transport.ledger.span("compare"):
            shared, colliding = masks(current.owned, coming.owned)
            # One message to each requester: its own requests' marks, first of the current batch, then of the coming one.
            now, then = shared.split(current.whole.receive), colliding.split(coming.whole.receive)
            marks = torch.cat([part for pair in zip(now, then, strict=True) for part in pair]).to(torch.uint8)
            send, receive = (
                [a + b for a, b in zip(getattr(current.whole, way), getattr(coming.whole, way), strict=True)]
                for way in ("receive", "send")
            )
        answer = transport.all_to_all(marks, send, receive, "ids").wait().bool()
        with transport.ledger.span("compare"):
            pairs = [n for pair in zip(current.whole.send, coming.whole.send, strict=True) for n in pair]
            parts = answer.split(pairs)
            mine_now, mine_then = torch.cat(parts[0::2]), torch.cat(parts[1::2])
            lists = [(mine_now, current.whole.send), (shared, current.whole.receive)]
            lists += [(mine_then, coming.whole.send), (colliding, coming.whole.receive)]
            # One trip to the host for all split sizes.
            counts = torch.stack([counts_per_rank(mask, part) for mask, part in lists]).tolist()
            current.shared, current.rest = _split(mine_now, shared, counts[0], counts[1], current.whole)
            coming.late, coming.early = _split(mine_then, colliding, counts[2], counts[3], coming.whole)

    def look_up(self, request: Request, part: Part, transport: Transport) -> Handle:
        """The rows of a part, on their way to the requesters."""
        with transport.ledger.span("lookup"):
            asked = request.owned if part.theirs is None else request.owned.index_select(0, part.theirs)
            found = gather_rows(self.rows.weight, asked)
        return transport.all_to_all(found, part.receive, part.send, "rows")

    def send(self, gradient: Tensor, part: Part, transport: Transport) -> Handle:
        """A part's gradients [sum(part.send), width], on their way to the owners."""
        return transport.all_to_all(gradient, part.send, part.receive, "gradients")

    def update(
        self, request: Request, part: Part, received: Tensor, transport: Transport, *, step: int, factor: float, clip: float | None
    ) -> None:
        """received [sum(part.receive), width]: gradients of the part, as `send` brought them."""
        with transport.ledger.span("update rows"):
            asked = request.owned if part.theirs is None else request.owned.index_select(0, part.theirs)
            rows, summed = sum_duplicates(asked, received)
            self.rows.update(rows, summed, step=step, factor=factor, clip=clip)

    def merge(self, request: Request, early: Tensor, late: Tensor) -> None:
        """Early and late rows become the rows of the request, to be read and differentiated."""
        assert request.early is not None and request.late is not None
        assert request.early.mine is not None and request.late.mine is not None
        rows = early.new_empty(early.shape[0] + late.shape[0], early.shape[1])
        rows.index_copy_(0, request.early.mine, early)
        rows.index_copy_(0, request.late.mine, late)
        request.rows = rows.requires_grad_(True)

    # ---- the blocking forms

    def fetch(self, request: Request, transport: Transport, train: bool) -> None:
        rows = self.look_up(request, request.whole, transport).wait()
        request.rows = rows.detach().requires_grad_(train)

    def apply(self, request: Request, transport: Transport, *, step: int, factor: float, clip: float | None) -> None:
        received = self.send(request.gradient(), request.whole, transport).wait()
        self.update(request, request.whole, received, transport, step=step, factor=factor, clip=clip)
        self._last_read = request.owned

    def collisions(self, request: Request) -> tuple[int, Tensor | int]:
        """(requests at this owner, those whose row the last step read too)."""
        if self._last_read is None:
            return request.owned.numel(), 0
        return request.owned.numel(), collision_masks(self._last_read, request.owned)[1].sum()

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
        segments = [Segment(spec, self.layout.base(table), 0, spec.rows) for table, spec in enumerate(specs)]
        self.rows = Rows(segments, self.layout.size, optimizer, transport.device)

    def request(self, batches: Sequence[SequenceBatch], transport: Transport) -> Request:
        """Marks the rows that this rank reads. `owned` holds the marks [size]."""
        with transport.ledger.span("deduplicate"):
            marks = self.rows.weight.new_zeros(self.layout.size)
            for table, spec in enumerate(self.layout.specs):
                for ids in _ids(batches, spec):
                    marks[self.layout.keys(table, ids.reshape(-1))] = 1
        empty = torch.zeros(0, dtype=torch.int64, device=marks.device)
        return Request(Index(empty, [], empty), Part(None, None, [], []), marks)

    def fetch(self, request: Request, transport: Transport, train: bool) -> None:
        request.rows = self.rows.weight.detach().requires_grad_(train)

    def apply(self, request: Request, transport: Transport, *, step: int, factor: float, clip: float | None) -> None:
        gradient = request.gradient()
        # One message: gradients, and behind them the marks of the rows that were read.
        joined = torch.cat([gradient.view(-1), request.owned])
        summed = transport.all_reduce(joined, "gradients").wait()
        with transport.ledger.span("update rows"):
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
