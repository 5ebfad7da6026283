"""The exchange of one group of tables: what a batch reads is fetched, its gradients go back to the
owners.

    request    deduplicate ids, AllToAll the split sizes and the ids                         (kind: ids)
    compare    owners tell the requesters which rows two consecutive batches share           (kind: ids)
    look_up    owners look up some of the rows, AllToAll them                                (kind: rows)
    send       AllToAll some of the gradients                                                (kind: gradients)
    update     sum duplicates in rank order, update the rows
    place      memory for the rows that come
    bring, give    look_up, or send and update, of several parts

What is not urgent travels in pieces, a part of the rows each: `bring` and `give` send one while
they work on the one before. `fetch` and `apply` are the blocking forms, over all rows: the serial
schedule needs no others. A replicated group has these two; its only traffic is one AllReduce in
`apply`. Everything runs on the caller's thread and stream, over the transport it passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.collision import Asked, Masks, collision_masks, divided, pieces_for
from freescale.embedding.layout import Layout, TableSpec, positions
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.request import Index, Part, Request, announced, parts_of
from freescale.embedding.storage import Rows, Segment
from freescale.kernels.dispatch import (
    deduplicate,
    gather_rows,
    group_duplicates,
    select_marked_rows,
)
from freescale.transport.api import Handle, Transport

Piece = TypeVar("Piece")


def in_turn(
    pieces: Iterable[Piece],
    start: Callable[[Piece], Handle],
    finish: Callable[[Piece, Tensor], None],
    lines: int,
) -> None:
    """A piece on every line, and one more, are under way before the first is finished: the network
    does not wait for the host."""
    under_way: deque[tuple[Piece, Handle]] = deque()
    for piece in pieces:
        under_way.append((piece, start(piece)))
        if len(under_way) > lines:
            first, handle = under_way.popleft()
            finish(first, handle.wait())
    for first, handle in under_way:
        finish(first, handle.wait())


class Sharded:
    """A group of tables, sharded by row over the ranks."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        optimizer: RowOptimizer,
        transport: Transport,
        wire: torch.dtype | None = None,
    ) -> None:
        """`wire`: the dtype of rows and gradients on the way; each value is rounded, on its own
        rank's rows too."""
        self.layout = Layout(tuple(specs), transport.world)
        segments = [
            Segment(spec, self.layout.base(table), *self.layout.owned(table, transport.rank))
            for table, spec in enumerate(specs)
        ]
        self.rows = Rows(segments, self.layout.size, optimizer, transport.device)
        self._encoding = wire if wire is not None else specs[0].dtype
        self._ids = torch.int32 if self.layout.size < 1 << 31 else torch.int64
        edges = torch.arange(1, transport.world + 1, device=transport.device) * self.layout.size
        self._edges = edges
        self._last_read: Tensor | None = None

    def request(self, batches: Sequence[SequenceBatch], transport: Transport) -> Request:
        with transport.ledger.span("deduplicate"):
            given = announced(batches, self.layout.specs)
            parts = [self.layout.keys(table, ids.reshape(-1)) for table, ids in given]
            keys = (
                torch.cat(parts)
                if parts
                else torch.zeros(0, dtype=torch.int64, device=transport.device)
            )
            found = deduplicate(keys, self._edges)
            # To each owner, how many of its rows; to everybody, how many rows in all.
            counts = torch.stack([found.counts, found.counts.sum().expand(transport.world)], dim=1)
        ones = [1] * transport.world
        asked = transport.all_to_all(counts, ones, ones, "ids").wait()
        (send, _), (receive, totals) = torch.stack([counts, asked]).transpose(1, 2).tolist()
        unique = found.keys[: sum(send)]
        local = (unique % self.layout.size).to(self._ids)
        owned = transport.all_to_all(local, send, receive, "ids").wait().long()
        pieces = pieces_for(
            sum(totals) * self.layout.specs[0].bytes_per_row // transport.world,
            transport.device,
            transport.world,
        )
        return Request(
            Index(unique, given, found.inverse), Part(None, None, send, receive), owned, pieces
        )

    def compare(
        self, current: Request, coming: Request, transport: Transport, masks: Masks
    ) -> None:
        """Divides both requests by what they share: `shared` and `rest` of the current one, `late`
        and `early` of the coming."""
        with transport.ledger.span("compare"):
            shared, colliding = masks(current.owned, coming.owned)
            # One message to each requester: its own requests' marks, first of the current batch,
            # then of the coming one.
            now, then = shared.split(current.whole.receive), colliding.split(coming.whole.receive)
            marks = torch.cat([part for pair in zip(now, then, strict=True) for part in pair]).to(
                torch.uint8
            )
            send, receive = (
                [
                    a + b
                    for a, b in zip(
                        getattr(current.whole, way), getattr(coming.whole, way), strict=True
                    )
                ]
                for way in ("receive", "send")
            )
        answer = transport.all_to_all(marks, send, receive, "ids").wait().bool()
        with transport.ledger.span("compare"):
            pairs = [
                n for pair in zip(current.whole.send, coming.whole.send, strict=True) for n in pair
            ]
            parts = answer.split(pairs)
            sides = (
                (current, torch.cat(parts[0::2]), shared),
                (coming, torch.cat(parts[1::2]), colliding),
            )
            asked = []
            for request, mine, theirs in sides:
                local = request.index.keys % self.layout.size
                asked.append(Asked(mine, local, request.whole.send, request.pieces))
                asked.append(Asked(theirs, request.owned, request.whole.receive, request.pieces))
            (mine_now, theirs_now, mine_then, theirs_then), counts = divided(asked)
            # One trip to the host for all split sizes.
            numbers = iter(counts.tolist())
            sizes = [[next(numbers) for _ in range(each.bins)] for each in asked]
            current.shared, *current.rest = parts_of(
                mine_now, sizes[0], theirs_now, sizes[1], transport.world
            )
            coming.late, *coming.early = parts_of(
                mine_then, sizes[2], theirs_then, sizes[3], transport.world
            )
            # Their update is on the way to the next forward: nothing is sorted there.
            current.shared = replace(current.shared, summed=self._grouped(current, current.shared))

    def place(self, request: Request, spent: Tensor | None) -> None:
        """Memory for the rows of the request, to be filled as they come: that of gradients which
        were sent, if it is enough. Fresh memory beside it would cost a batch more, and the time to
        map it."""
        count, width = request.index.keys.numel(), self.rows.weight.shape[1]
        if spent is not None and spent.numel() >= count * width:
            request.rows = spent.detach().view(-1)[: count * width].view(count, width)
        else:
            request.rows = self.rows.weight.new_empty(count, width)

    def look_up(self, request: Request, part: Part, transport: Transport) -> Handle:
        """The rows of a part, on their way to the requesters."""
        with transport.ledger.span("lookup"):
            found = gather_rows(self.rows.weight, _asked(request, part), self._encoding)
        return transport.all_to_all(found, part.receive, part.send, "rows")

    def bring(self, request: Request, parts: Sequence[Part], transport: Transport) -> None:
        """Looks up the parts and puts the rows where they belong."""

        def put(part: Part, rows: Tensor) -> None:
            assert request.rows is not None and part.mine is not None
            request.rows.index_copy_(0, part.mine, rows.to(request.rows.dtype))

        in_turn(parts, lambda part: self.look_up(request, part, transport), put, transport.lines)

    def send(self, gradient: Tensor, part: Part, transport: Transport) -> Handle:
        """A part of the gradient [u, width], on its way to the owners."""
        chosen = gradient if part.mine is None else gradient.index_select(0, part.mine)
        return transport.all_to_all(chosen.to(self._encoding), part.send, part.receive, "gradients")

    def update(
        self, request: Request, part: Part, received: Tensor, transport: Transport, **how: Any
    ) -> None:
        """received [sum(part.receive), width]: gradients of the part, as `send` brought them.
        `how`: of `Rows.update`."""
        with transport.ledger.span("update rows"):
            summed = part.summed or self._grouped(request, part)
            self.rows.update(*summed(received.to(self.rows.weight.dtype)), **how)

    def _grouped(self, request: Request, part: Part) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        return group_duplicates(_asked(request, part), self.rows.weight)

    def give(
        self,
        request: Request,
        gradient: Tensor,
        parts: Sequence[Part],
        transport: Transport,
        **how: Any,
    ) -> None:
        """Sends the parts of the gradient to the owners, who update the rows."""
        in_turn(
            parts,
            lambda part: self.send(gradient, part, transport),
            lambda part, received: self.update(request, part, received, transport, **how),
            transport.lines,
        )

    # ---- the blocking forms

    def fetch(self, request: Request, transport: Transport, train: bool) -> None:
        rows = self.look_up(request, request.whole, transport).wait()
        request.rows = rows.to(self.rows.weight.dtype).detach().requires_grad_(train)

    def apply(
        self,
        request: Request,
        transport: Transport,
        *,
        step: int,
        factor: float,
        clip: float | None,
    ) -> None:
        received = self.send(request.gradient(), request.whole, transport).wait()
        self.update(
            request, request.whole, received, transport, step=step, factor=factor, clip=clip
        )
        self._last_read = request.owned

    def collisions(self, request: Request) -> tuple[int, Tensor | int]:
        """(requests at this owner, those whose row the last step read too)."""
        if self._last_read is None:
            return request.owned.numel(), 0
        return request.owned.numel(), collision_masks(self._last_read, request.owned)[1].sum()

    def read(
        self, request: Request, table: int, ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(rows to index, index [...], found [...] or None if all are known to be there)."""
        assert request.rows is not None
        index = request.index.known(table, ids)
        if index is not None:
            return request.rows, index, None
        found, there = request.index.search(self.layout.keys(table, ids))
        return request.rows, found, there


def _asked(request: Request, part: Part) -> Tensor:
    """Local rows of the part that are asked of this rank."""
    return request.owned if part.theirs is None else request.owned.index_select(0, part.theirs)


class Replicated:
    """A group of tables that every rank holds whole. Lazy like the sharded ones: only rows that
    some rank read change."""

    def __init__(
        self, specs: Sequence[TableSpec], optimizer: RowOptimizer, transport: Transport
    ) -> None:
        self.layout = Layout(tuple(specs), 1)
        segments = [
            Segment(spec, self.layout.base(table), 0, spec.rows) for table, spec in enumerate(specs)
        ]
        self.rows = Rows(segments, self.layout.size, optimizer, transport.device)

    def request(self, batches: Sequence[SequenceBatch], transport: Transport) -> Request:
        """Marks the rows that this rank reads. `owned` holds the marks [size]."""
        with transport.ledger.span("deduplicate"):
            marks = self.rows.weight.new_zeros(self.layout.size)
            given = announced(batches, self.layout.specs)
            parts = [self._places(table, ids.reshape(-1)) for table, ids in given]
            places = (
                torch.cat(parts)
                if parts
                else torch.zeros(0, dtype=torch.int64, device=marks.device)
            )
            marks[places] = 1
        return Request(Index(places[:0], given, places), Part(None, None, [], []), marks)

    def _places(self, table: int, ids: Tensor) -> Tensor:
        return positions(ids, self.layout.specs[table].rows) + self.layout.base(table)

    def fetch(self, request: Request, transport: Transport, train: bool) -> None:
        request.rows = self.rows.weight.detach().requires_grad_(train)

    def apply(
        self,
        request: Request,
        transport: Transport,
        *,
        step: int,
        factor: float,
        clip: float | None,
    ) -> None:
        gradient = request.gradient()
        # One message: gradients, and behind them the marks of the rows that were read.
        joined = torch.cat([gradient.view(-1), request.owned])
        summed = transport.all_reduce(joined, "gradients").wait()
        with transport.ledger.span("update rows"):
            rows, gradients = select_marked_rows(
                summed[gradient.numel() :], summed[: gradient.numel()].view_as(gradient)
            )
            self.rows.update(rows, gradients, step=step, factor=factor, clip=clip)

    def collisions(self, request: Request) -> tuple[int, int]:
        """Replicated rows are never requested."""
        return 0, 0

    def read(
        self, request: Request, table: int, ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        assert request.rows is not None
        index = request.index.known(table, ids)
        if index is not None:
            return request.rows, index, None
        index = self._places(table, ids)
        return request.rows, index, request.owned[index] > 0
