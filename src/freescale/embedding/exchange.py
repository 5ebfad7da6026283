"""The exchange of one group of tables: rows travel to the ranks that read them, gradients back to
the owners.

    request           deduplicate ids, AllToAll split sizes and ids                    (kind: ids)
    compare           divide two consecutive requests by the rows they share           (kind: ids)
    make_resident     owners make sure that the rows lie where the device can reach them
    allocate_rows     memory for the rows of a request
    pull_rows         look up parts of a request on their owners, AllToAll, store      (kind: rows)
    push_gradients    AllToAll parts of a gradient, sum duplicates in rank order,
                      update the rows                                             (kind: gradients)

Bulk traffic is cut into pieces: `pull_rows` and `push_gradients` send one while they work on the
one before it. `fetch` and `apply` are the blocking forms, over all rows: the serial schedule needs
no others, and a replicated group (replicated.py) has no others.
Everything runs on the caller's thread and stream, over the transport that it passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.collision import Masks, collision_masks, count_pieces, is_few
from freescale.embedding.comparison import compare_requests
from freescale.embedding.dynamic.directory import mark_any
from freescale.embedding.dynamic.layout import DynamicLayout
from freescale.embedding.dynamic.storage import DynamicStorage
from freescale.embedding.host_tables.plan import CacheTooSmall
from freescale.embedding.host_tables.storage import CachedStorage
from freescale.embedding.host_tables.tiers import Tier
from freescale.embedding.layout import ShardLayout, TableSpec
from freescale.embedding.open_storage import open_storage
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.request import (
    GroupIds,
    Index,
    Request,
    RequestPart,
    SumGradients,
    collect_ids,
    has_default_row,
    mark_counted,
    mark_draws,
)
from freescale.embedding.storage import UpdateOptions
from freescale.kernels.dispatch.requests import deduplicate, put_rows
from freescale.kernels.dispatch.rows import group_duplicates
from freescale.kernels.requests.reference import Unique
from freescale.transport.api import Handle, Transport
from freescale.transport.failures import raise_in_step

Piece = TypeVar("Piece")
_MARK_BITS = 2  # `mark_counted` marks by 0, 1 and 2
_MARK = (1 << _MARK_BITS) - 1


def run_pipelined(
    pieces: Iterable[Piece],
    start: Callable[[Piece], Handle],
    finish: Callable[[Piece, Tensor], None],
    lines: int,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Starts and finishes all pieces. One per line and one more are under way before the first is
    finished, so the network does not wait for the host, which does something `meanwhile`."""
    under_way: deque[tuple[Piece, Handle]] = deque()
    for piece in pieces:
        under_way.append((piece, start(piece)))
        if len(under_way) > lines:
            if meanwhile is not None:
                meanwhile()
                meanwhile = None
            first, handle = under_way.popleft()
            finish(first, handle.wait())
    if meanwhile is not None:
        meanwhile()
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
        tier: Tier | None = None,
    ) -> None:
        """`wire`: the dtype of rows and gradients on the way; each value is rounded, on its own
        rank's rows too. `tier`: where rows are at home, if not on the device."""
        self.layout: ShardLayout | DynamicLayout = ShardLayout(tuple(specs), transport.world)
        if specs[0].dynamic is not None:
            self.layout = DynamicLayout((specs[0],), transport.world)
        self.rows = open_storage(self.layout, optimizer, transport, tier)
        self._encoding = wire if wire is not None else specs[0].dtype
        self._ids = self.layout.local_dtype
        self._edges = self.layout.list_edges(transport.device)
        self._last_read: Tensor | None = None
        rules = specs[0].dynamic  # such a table is alone in its group
        self._has_negatives = bool(rules and set(rules.negatives) & set(specs[0].features))
        self._has_default = has_default_row(specs[0])
        self._has_marks = self._has_negatives or self._has_default
        self._counts_draws = bool(rules and rules.draws is not None)

    def request(self, batches: Sequence[SequenceBatch], transport: Transport) -> Request:
        with transport.ledger.span("deduplicate"):
            given = collect_ids(batches, self.layout.specs)
            keys = self._compute_keys(given, transport.device)
            found = deduplicate(keys, self._edges)
            own = found.counts
            if isinstance(self.layout, DynamicLayout):
                own = own + self.layout.count_above(keys)
        send, receive, totals = _exchange_counts(own, transport)
        unique = found.keys[: sum(send)]
        local = self.layout.find_local(unique).to(self._ids)
        about = self._describe_ids(batches, found)
        if about is None:
            owned = transport.all_to_all(local, send, receive, "ids").wait().long()
            counted = drawn = None
        else:  # one message for all
            both = torch.stack([local, about[: sum(send)]], 1)
            owned, about = transport.all_to_all(both, send, receive, "ids").wait().unbind(1)
            owned = owned.contiguous()
            counted = (about & _MARK).to(torch.uint8) if self._has_marks else None
            drawn = about >> _MARK_BITS if self._counts_draws else None
        size = sum(totals) * self.layout.specs[0].bytes_per_row // transport.world
        return Request(
            Index(unique, given, found.inverse),
            RequestPart(None, None, send, receive),
            owned,
            count_pieces(size, transport.device, transport.world),
            is_few(size, transport.device, transport.nearby),
            counted,
            drawn,
        )

    def _describe_ids(self, batches: Sequence[SequenceBatch], found: Unique) -> Tensor | None:
        """[u] int64, for the different ids of a dynamic table: the lowest bits are the mark of an
        id that counts, the others what it is worth as a draw. None if the owner need know
        neither."""
        if not self._has_marks and not self._counts_draws:
            return None
        about = torch.zeros_like(found.keys)
        if self._counts_draws:
            worth = mark_draws(batches, self.layout.specs[0])
            if worth is not None:
                about.index_add_(0, found.inverse, worth << _MARK_BITS)
        if self._has_marks:
            marks = mark_counted(batches, self.layout.specs[0])
            if marks is not None:
                about |= mark_any(marks, found.inverse, found.keys.numel())
        return about

    def _compute_keys(self, given: GroupIds, device: torch.device) -> Tensor:
        """[n]: the keys of all ids."""
        parts = []
        for table, own in groupby(given, itemgetter(0)):
            ids = [each.reshape(-1) for _, each in own]
            # one computation for all features of a table: many have a few ids each
            parts.append(self.layout.compute_keys(table, _join(ids)))
        return _join(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)

    def compare(
        self,
        current: Request,
        following: Request,
        transport: Transport,
        masks: Masks,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Sets `urgent` and `deferred` of the current request, `late` and `early` of the following
        one. If both have few rows, nothing is deferred and no row is early, which is right whatever
        the batches share. Otherwise a collective. Calls `meanwhile` while a GPU compares."""
        if current.few and following.few and masks is collision_masks:
            urgent, current.deferred = current.whole, []
            following.late, following.early = following.whole, []
            shared = masks(current.owned, following.owned)[1]
            following.collisions = int(np.count_nonzero(shared.numpy()))
            if meanwhile is not None:
                meanwhile()
        else:
            find_local = self.layout.find_local
            parts = compare_requests(current, following, find_local, transport, masks, meanwhile)
            (urgent, *current.deferred), (following.late, *following.early) = parts
            following.collisions = sum(following.late.receive)
        with transport.ledger.span("compare"):
            # Prepared here: the update of these rows delays the next forward.
            current.urgent = replace(urgent, sum_gradients=self._prepare_sums(current, urgent))

    def make_resident(self, request: Request, transport: Transport) -> None:
        """Makes sure that the rows which are requested from this rank can be gathered and updated,
        and sets their slots. A collective if that can fail, or if the table counts draws: their
        log-q is on its way from then on (`Request.await_log_q`)."""
        error = None
        try:
            request.slots = self.rows.make_resident(
                request.owned, transport.ledger, request.counted
            )
        except Exception as caught:  # noqa: BLE001 - raised on all ranks
            error = caught
        if isinstance(self.rows, CachedStorage):
            need = error.need if isinstance(error, CacheTooSmall) else 0
            raise_in_step(error, transport, need)
        elif error is not None:
            raise error
        if request.slots is not None:  # once, not for each piece of the gradient
            request.targets = self.rows.find_targets(request.slots)
        if self._has_default and request.slots is not None:
            assert isinstance(self.rows, DynamicStorage)
            self._redirect(request, self.rows.find_missing(request.slots), transport)
        if request.drawn is not None:
            assert isinstance(self.rows, DynamicStorage)
            log_q, part = self.rows.count_draws(request.owned, request.drawn), request.whole
            request.log_q_handle = transport.all_to_all(log_q, part.receive, part.send, "ids")

    def _redirect(self, request: Request, missing: Tensor, transport: Transport) -> None:
        """Tells requesters which of their ids have no row, and has the default row read for them.
        missing [sum(receive)] uint8. A collective."""
        part = request.whole
        absent = transport.all_to_all(missing, part.receive, part.send, "ids").wait().bool()
        if absent.numel():
            request.index.redirect(absent)

    def allocate_rows(self, request: Request, spent: Tensor | None) -> None:
        """Gives the rows of the request memory, to be filled as they arrive: that of the `spent`
        gradients if it is large enough. Fresh memory would cost another batch, and the time to map
        it. From then on any lane may pull them."""
        self.rows.wait_for_rows()
        count, width = request.index.keys.numel(), self.rows.weight.shape[1]
        if spent is not None and spent.numel() >= count * width:
            request.rows = spent.detach().view(-1)[: count * width].view(count, width)
        else:
            request.rows = self.rows.weight.new_empty(count, width)

    def pull_rows(
        self, request: Request, parts: Sequence[RequestPart], transport: Transport
    ) -> None:
        """Looks up the parts on their owners and stores the rows in `request.rows`. A
        collective."""

        def store(part: RequestPart, rows: Tensor) -> None:
            assert request.rows is not None
            if part.requested is None:
                request.rows.copy_(rows)
            else:
                put_rows(request.rows, part.requested, rows)

        lines = transport.lines
        if self.rows.weight.is_cuda:
            lines += 1  # a piece waits for the device's other work longer than it travels
        run_pipelined(parts, lambda part: self._look_up(request, part, transport), store, lines)

    def push_gradients(
        self,
        request: Request,
        gradient: Tensor,
        parts: Sequence[RequestPart],
        transport: Transport,
        meanwhile: Callable[[], None] | None = None,
        **options: Unpack[UpdateOptions],
    ) -> None:
        """Sends the parts of the gradient [u, width] to the owners, who update the rows; calls
        `meanwhile`, before a row is updated, while the first ones are on their way. A
        collective."""
        lines = transport.lines
        if meanwhile is not None and gradient.is_cuda:
            lines += 1  # it takes the host as long as some pieces travel
        run_pipelined(
            parts,
            lambda part: self._send(gradient, part, transport),
            lambda part, received: self._update(request, part, received, transport, **options),
            lines,
            meanwhile,
        )

    def _look_up(self, request: Request, part: RequestPart, transport: Transport) -> Handle:
        """The rows of a part, on their way to the requesters."""
        with transport.ledger.span("lookup"):
            if request.slots is None:
                found = self.rows.read(_select_served(request.owned, part), self._encoding)
            else:
                found = self.rows.gather(_select_served(request.slots, part), self._encoding)
        return transport.all_to_all(found, part.receive, part.send, "rows")

    def _send(self, gradient: Tensor, part: RequestPart, transport: Transport) -> Handle:
        """A part of the gradient [u, width], on its way to the owners."""
        chosen = gradient if part.requested is None else gradient.index_select(0, part.requested)
        return transport.all_to_all(chosen.to(self._encoding), part.send, part.receive, "gradients")

    def _update(
        self,
        request: Request,
        part: RequestPart,
        received: Tensor,
        transport: Transport,
        **options: Unpack[UpdateOptions],
    ) -> None:
        """received [sum(part.receive), width]: gradients of the part, as `_send` brought them."""
        with transport.ledger.span("update rows"):
            sum_gradients = part.sum_gradients or self._prepare_sums(request, part)
            self.rows.update(*sum_gradients(received.to(self.rows.weight.dtype)), **options)

    def _prepare_sums(self, request: Request, part: RequestPart) -> SumGradients:
        assert request.targets is not None
        return group_duplicates(_select_served(request.targets, part), self.rows.weight)

    # ---- the blocking forms

    def fetch(self, request: Request, transport: Transport, train: bool) -> None:
        """Brings all rows of the request here; with `train`, they become resident at their owners.
        A collective."""
        if train and request.slots is None:
            self.make_resident(request, transport)
            request.await_log_q()
        elif self._has_default and not train:
            assert isinstance(self.rows, DynamicStorage)
            self._redirect(request, self.rows.find_missing_keys(request.owned), transport)
        rows = self._look_up(request, request.whole, transport).wait()
        request.open(rows.to(self.rows.weight.dtype), train)

    def apply(
        self, request: Request, transport: Transport, **options: Unpack[UpdateOptions]
    ) -> None:
        """Sends the gradient of the request's rows and updates the tables. A collective."""
        received = self._send(request.take_gradient(), request.whole, transport).wait()
        self._update(request, request.whole, received, transport, **options)
        self._last_read = request.owned

    def count_collisions(self, request: Request) -> tuple[int, Tensor | int]:
        """(requests at this owner, those whose row the last step read too)."""
        if self._last_read is None:
            return request.owned.numel(), 0
        return request.owned.numel(), collision_masks(self._last_read, request.owned)[1].sum()

    def locate(
        self, request: Request, table: int, ids: Tensor
    ) -> tuple[int | None, Tensor, Tensor | None]:
        """For `request.read`: (number of the part or None, index [...] of ids [...]), and found
        [...], or None if all are known to be there."""
        known = request.index.find_known(table, ids)
        if known is not None:
            return *known, None
        return None, *request.index.search(self.layout.compute_keys(table, ids))

    def find_log_q(self, request: Request, table: int, ids: Tensor) -> Tensor:
        """[...] of ids [...], which the request holds and whose draws it has counted."""
        assert request.log_q is not None
        index = request.index.find_own(table, ids, self.layout.compute_keys(table, ids))
        return request.log_q.index_select(0, index.reshape(-1)).view(ids.shape)


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Some tensors, at least one, one after another."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _exchange_counts(own: Tensor, transport: Transport) -> tuple[list[int], list[int], list[int]]:
    """Tells each owner how many of its rows this rank requests, own [ranks], and everybody how many
    in all. Returns the rows that this rank requests from each, that each requests from this one,
    and that each requests in all."""
    ones, send = [1] * transport.world, own.tolist()
    # From host to host, of a GPU too: a few numbers, which nobody wants on a device.
    counts = torch.tensor([[count, sum(send)] for count in send])
    kind = "ids" if own.is_cpu else "counts"
    receive, totals = transport.all_to_all(counts, ones, ones, kind).wait().T.tolist()
    return send, receive, totals


def _select_served(numbers: Tensor, part: RequestPart) -> Tensor:
    """Out of one number for each row that is requested from this rank: those of the part."""
    return numbers if part.served is None else numbers.index_select(0, part.served)
