"""The exchange of one group of tables: rows travel to the ranks that read them, gradients back to
the owners.

    request           deduplicate ids, AllToAll split sizes and ids                    (kind: ids)
    resolve           owners make sure that the rows lie where the device can reach them
    compare           divide two consecutive requests by the rows they share           (kind: ids)
    allocate_rows     memory for the rows of a request
    pull_rows         look up parts of a request on their owners, AllToAll, store      (kind: rows)
    open              the model can read the rows
    push_gradients    AllToAll parts of a gradient, sum duplicates in rank order,
                      update the rows                                             (kind: gradients)

Bulk traffic is cut into pieces: `pull_rows` and `push_gradients` send one while they work on the
one before it. `fetch`, `collect` and `update` are the blocking verbs that all groups have
(table_set.py): the serial schedule needs no others.
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
from freescale.embedding.collision import (
    Masks,
    collision_masks,
    compare_requests,
    count_pieces,
)
from freescale.embedding.dynamic.directory import mark_any
from freescale.embedding.host_tables.plan import CacheTooSmall
from freescale.embedding.host_tables.tiers import Tier
from freescale.embedding.layout import DynamicLayout, Layout, ShardLayout, TableSpec
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.request import (
    GradientParts,
    GroupIds,
    Index,
    LogQ,
    Relay,
    Requested,
    RequestPart,
    Resident,
    RowParts,
    SumGradients,
    has_default_row,
    list_ids,
)
from freescale.embedding.rows import FetchedRows, TrainingRows
from freescale.embedding.storage.api import Counted, Storage, UpdateOptions
from freescale.embedding.storage.opening import open_storage
from freescale.embedding.two_level import (
    TwoHops,
    exchange_counts,
    order_by_leader,
    pass_on,
    plan_route,
)
from freescale.kernels.dispatch.requests import deduplicate, put_rows
from freescale.kernels.dispatch.rows import group_duplicates
from freescale.kernels.requests.reference import Unique
from freescale.transport.api import Handle, Sizes, Transport
from freescale.transport.failures import raise_in_step

Piece = TypeVar("Piece")
_MARK_BITS = 2  # marks of `RequestedIds` are 0, 1 and 2
_MARK = (1 << _MARK_BITS) - 1


def run_pipelined(
    pieces: Iterable[Piece],
    start: Callable[[Piece], Handle],
    finish: Callable[[Piece, Tensor], None],
    lines: int,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Starts and finishes all pieces. One per line and one more are under way before the first is
    finished, so the network does not wait for the host, which does something `meanwhile`. Of two
    hops, as many are on each: a channel ends its exchanges in order, and who waited at once for the
    second hop of one piece would wait for the first hop of all others."""
    first_hop: deque[tuple[Piece, Handle]] = deque()
    last_hop: deque[tuple[Piece, Handle]] = deque()

    def advance() -> None:
        piece, handle = first_hop.popleft()
        if isinstance(handle, TwoHops):
            handle.advance()
        last_hop.append((piece, handle))
        if not isinstance(handle, TwoHops) or len(last_hop) > lines:
            end()

    def end() -> None:
        piece, handle = last_hop.popleft()
        finish(piece, handle.wait())

    for piece in pieces:
        first_hop.append((piece, start(piece)))
        if len(first_hop) > lines:
            if meanwhile is not None:
                meanwhile()
                meanwhile = None
            advance()
    if meanwhile is not None:
        meanwhile()
    while first_hop:
        advance()
    while last_hop:
        end()


class Sharded:
    """A group of tables, sharded by row over the ranks."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        optimizer: RowOptimizer,
        transport: Transport,
        wire: torch.dtype | None = None,
        tier: Tier | None = None,
        exchange: str = "flat",
    ) -> None:
        """`wire`: the dtype of rows and gradients on the way; each value is rounded, on its own
        rank's rows too. `tier`: where rows are at home, if not on the device. `exchange`: flat or
        two-level."""
        rules = specs[0].dynamic  # such a table is alone in its group
        self.layout: Layout = ShardLayout(tuple(specs), transport.world)
        if rules is not None:
            self.layout = DynamicLayout((specs[0],), transport.world)
        self.rows: Storage = open_storage(self.layout, optimizer, transport, tier)
        self.encoding = wire if wire is not None else specs[0].dtype
        self._ids = self.layout.local_dtype
        self._edges = self.layout.list_edges(transport.device)
        self._route = plan_route(exchange, transport.machines, transport.rank)
        self._last_read: Tensor | None = None
        negatives = rules is not None and set(rules.negatives) & set(specs[0].features)
        self._has_marks = bool(negatives) or has_default_row(specs[0])
        self._counts_draws = bool(rules and rules.draws is not None)

    # ---- the verbs of a step, blocking: table_set.py

    def request(self, batches: Sequence[SequenceBatch], transport: Transport) -> Requested:
        """Sends the different ids of (micro-)batches to the owners of their rows. A collective."""
        with transport.ledger.span("deduplicate"):
            given = list_ids(batches, self.layout.specs)
            keys = self._compute_keys(given.ids, transport.device)
            found = deduplicate(keys, self._edges)
            send = self.layout.count_owned(keys, found.counts).tolist()
            unique = keys = found.keys[: sum(send)]
            about = self._describe_ids(Counted(given.marks, given.draws), found)
        total, relay = sum(send), None
        if self._route.through is not None:
            keys, about, send, total, relay = self._gather_ids(keys, about, send, transport)
        route, kind = self._route, self._counts_kind
        receive, total = exchange_counts(send, total, route.leads, route.leaders, transport, kind)
        local = self.layout.find_local(keys).to(self._ids)
        owned, about = _send_ids(local, about, send, receive, transport)
        size = total * self.layout.specs[0].bytes_per_row // transport.world
        return Requested(
            Index(unique, given.ids, found.inverse),
            keys,
            RequestPart(None, None, send, receive, relay=relay),
            owned.long(),
            size,
            count_pieces(size, transport.device, transport.world),
            *self._read_description(about),
        )

    def fetch(self, request: Requested, transport: Transport, train: bool) -> FetchedRows:
        """Brings all rows of the request here. With `train`, their step begins. A collective."""
        if train:
            return self.fetch_resident(request, self.resolve(request, transport), transport)
        index, missing = request.index, self.rows.describe(request.owned)
        if missing is not None:
            index = self._redirect(request, missing, transport)
        with transport.ledger.span("lookup"):
            found = self.rows.read(request.owned, self.encoding)
        rows = self._answer(found, request.whole, transport).wait()
        rows = rows.to(self.rows.weight.dtype)
        return FetchedRows(index, rows, self.layout.compute_keys, train=False)

    def fetch_resident(
        self, request: Requested, resident: Resident, transport: Transport
    ) -> TrainingRows:
        """Brings all rows of a resolved request here, and begins their step. A collective."""
        if resident.log_q is not None:
            resident.log_q.wait()
        rows = self._look_up(resident, request.whole, transport).wait()
        return self.open(request, resident, rows.to(self.rows.weight.dtype), transport)

    def open(
        self, request: Requested, resident: Resident, rows: Tensor, transport: Transport
    ) -> TrainingRows:
        """The rows [u, width] are here: their step begins, and the model can read them."""
        self.rows.begin(transport.ledger)
        return TrainingRows(request, resident, rows, self.layout.compute_keys)

    def collect(self, rows: TrainingRows, transport: Transport) -> tuple[TrainingRows, Tensor]:
        """Sends the gradient of the rows to the owners. A collective."""
        gradient = rows.pop_gradient()
        return rows, self._send(gradient, rows.request.whole, transport).wait()

    def update(
        self,
        collected: tuple[TrainingRows, Tensor],
        transport: Transport,
        **options: Unpack[UpdateOptions],
    ) -> None:
        """Updates the rows that this rank owns."""
        rows, received = collected
        self._update(rows.resident.targets, rows.request.whole, received, transport, **options)
        self._last_read = rows.request.owned

    def count_collisions(self, request: Requested) -> tuple[int, Tensor | int]:
        """(requests at this owner, those whose row the last step read too)."""
        if self._last_read is None:
            return request.owned.numel(), 0
        return request.owned.numel(), collision_masks(self._last_read, request.owned)[1].sum()

    # ---- the stages of the staged schedule

    def resolve(self, request: Requested, transport: Transport) -> Resident:
        """Makes sure that the rows which are requested from this rank can be gathered and updated.
        A collective if that can fail, if ids without a row read a learned default row, or if the
        table counts draws: log-q are on their way from then on."""
        error = found = None
        try:
            counted = Counted(request.marks, request.draws)
            found = self.rows.resolve(request.owned, transport.ledger, counted)
        except Exception as caught:  # noqa: BLE001 - raised on all ranks
            error = caught
        if self.rows.may_fail:
            need = error.need if isinstance(error, CacheTooSmall) else 0
            raise_in_step(error, transport, need)
        elif error is not None:
            raise error
        assert found is not None
        targets = self.rows.find_targets(found.slots)  # once, not for each piece of the gradient
        index, log_q = request.index, None
        if found.missing is not None:
            index = self._redirect(request, found.missing, transport)
        if found.log_q is not None:
            log_q = LogQ(self._answer(found.log_q, request.whole, transport, "ids"))
        return Resident(index, found.slots, targets, log_q)

    def compare(
        self,
        current: tuple[Requested, Resident],
        following: Requested,
        transport: Transport,
        masks: Masks,
        *,
        divides: bool,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[GradientParts, RowParts]:
        """Divides the gradients of the current request and the rows of the following one by the
        rows that both read. A collective, unless nothing is divided: all gradients are urgent then,
        and all rows late. Calls `meanwhile` while a GPU compares."""
        request, resident = current
        if divides:
            find_local = self.layout.find_local
            parts = compare_requests(request, following, find_local, transport, masks, meanwhile)
            (urgent, *deferred), (late, *early) = parts
            collisions = sum(late.receive)
        else:
            urgent, late, deferred, early = request.whole, following.whole, [], []
            shared = masks(request.owned, following.owned)[1]
            collisions = int(np.count_nonzero(shared.numpy()))
            meanwhile()
        with transport.ledger.span("compare"):
            # Prepared here: the update of these rows delays the next forward.
            urgent = replace(urgent, sum_gradients=self._prepare_sums(resident.targets, urgent))
            if (relay := urgent.relay) is not None:
                sums = group_duplicates(relay.members, self.rows.weight)
                urgent = replace(urgent, relay=replace(relay, sum_gradients=sums))
        return GradientParts(urgent, deferred), RowParts(late, early, collisions)

    def allocate_rows(self, request: Requested, spent: Tensor | None) -> Tensor:
        """Memory for the rows of the request, which any lane may pull from then on: that of the
        `spent` gradients if it is large enough, since fresh memory has to be mapped first."""
        self.rows.wait_for_rows()
        count, width = request.index.keys.numel(), self.rows.weight.shape[1]
        if spent is not None and spent.numel() >= count * width:
            return spent.detach().view(-1)[: count * width].view(count, width)
        return self.rows.weight.new_empty(count, width)

    def pull_rows(
        self, resident: Resident, rows: Tensor, parts: Sequence[RequestPart], transport: Transport
    ) -> None:
        """Looks up the parts on their owners, into rows [u, width]. A collective."""

        def store(part: RequestPart, found: Tensor) -> None:
            if (places := part.places) is None:
                rows.copy_(found)
            else:
                put_rows(rows, places, found)

        lines = transport.lines
        if self.rows.weight.is_cuda:
            lines += 1  # a piece waits for the device's other work longer than it travels
        run_pipelined(parts, lambda part: self._look_up(resident, part, transport), store, lines)

    def push_gradients(
        self,
        targets: Tensor,
        gradient: Tensor,
        parts: Sequence[RequestPart],
        transport: Transport,
        meanwhile: Callable[[], None] | None = None,
        **options: Unpack[UpdateOptions],
    ) -> None:
        """Sends parts of the gradient [u, width] to the owners, who update the rows, `targets` of
        `Resident`; calls `meanwhile` before, while the first are on their way. A collective."""
        lines = transport.lines
        if meanwhile is not None and gradient.is_cuda:
            lines += 1  # it takes the host as long as some pieces travel
        run_pipelined(
            parts,
            lambda part: self._send(gradient, part, transport),
            lambda part, received: self._update(targets, part, received, transport, **options),
            lines,
            meanwhile,
        )

    # ---- parts

    def _compute_keys(self, given: GroupIds, device: torch.device) -> Tensor:
        """[n]: the keys of all ids."""
        parts = []
        for table, own in groupby(given, itemgetter(0)):
            ids = [each.reshape(-1) for _, each in own]
            # one computation for all features of a table: many have a few ids each
            parts.append(self.layout.compute_keys(table, _join(ids)))
        return _join(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)

    def _gather_ids(
        self, keys: Tensor, about: Tensor | None, own: list[int], transport: Transport
    ) -> tuple[Tensor, Tensor | None, list[int], int, Relay]:
        """The ranks of a machine send their keys [u], and what the owners have to know `about` each
        of them, to the leaders; own [world] is how many each owner has. Returns what this rank
        requests as a leader: keys, what is known about them, how many each owner has. And how many
        keys the machine's ranks have together, and how all that returns to them. A collective."""
        route = self._route
        assert route.through is not None
        order, send = order_by_leader(route.through, own)
        receive, total = exchange_counts(
            send, sum(send), route.near, route.near, transport, self._counts_kind
        )
        places = torch.split(torch.arange(len(keys), dtype=torch.int32, device=keys.device), own)
        requested = _join([places[owner] for owner in order])
        chosen = about[requested] if about is not None else None
        arrived, about = _send_ids(keys[requested], chosen, send, receive, transport)
        with transport.ledger.span("deduplicate"):
            found = deduplicate(arrived, self._edges)
            own = self.layout.count_owned(arrived, found.counts).tolist()
            about = self._describe_ids(self._read_description(about), found)
        relay = Relay(requested, found.inverse, send, receive)
        return found.keys[: sum(own)], about, own, total, relay

    def _describe_ids(self, counted: Counted, found: Unique) -> Tensor | None:
        """[u] int64, for the different ids of a dynamic table: the lowest bits are the largest
        mark, the others the sum of draws. None if the owner need know neither."""
        if not self._has_marks and not self._counts_draws:
            return None
        about = torch.zeros_like(found.keys)
        if counted.draws is not None:
            about.index_add_(0, found.inverse, counted.draws << _MARK_BITS)
        if counted.marks is not None:
            about |= mark_any(counted.marks, found.inverse, found.keys.numel())
        return about

    def _read_description(self, about: Tensor | None) -> Counted:
        """What `_describe_ids` wrote."""
        if about is None:
            return Counted()
        marks = (about & _MARK).to(torch.uint8) if self._has_marks else None
        return Counted(marks, about >> _MARK_BITS if self._counts_draws else None)

    @property
    def _counts_kind(self) -> str:
        return "ids" if self._edges.is_cpu else "counts"

    def _redirect(self, request: Requested, missing: Tensor, transport: Transport) -> Index:
        """Requesters learn which of their ids have no row, and read the default row for them.
        missing [sum(receive)] uint8. A collective."""
        absent = self._answer(missing, request.whole, transport, "ids").wait().bool()
        return request.index.redirect(absent)

    def _look_up(self, resident: Resident, part: RequestPart, transport: Transport) -> Handle:
        """The rows of a part, on their way to the requesters."""
        with transport.ledger.span("lookup"):
            found = self.rows.gather(_select_served(resident.slots, part), self.encoding)
        return self._answer(found, part, transport)

    def _answer(
        self, rows: Tensor, part: RequestPart, transport: Transport, kind: str = "rows"
    ) -> Handle:
        """Something for each row of a part, on its way to the requesters."""
        handle = transport.all_to_all(rows, part.receive, part.send, kind)
        relay = part.relay
        return handle if relay is None else pass_on(handle, part, relay, transport, kind)

    def _send(self, gradient: Tensor, part: RequestPart, transport: Transport) -> Handle:
        """A part of the gradient [u, width], on its way to the owners."""
        relay = part.relay
        places = part.requested if relay is None else relay.requested
        chosen = gradient if places is None else gradient.index_select(0, places)

        def send(rows: Tensor) -> Handle:
            rows = rows.to(self.encoding)
            return transport.all_to_all(rows, part.send, part.receive, "gradients")

        if relay is None:
            return send(chosen)
        sums = relay.sum_gradients or group_duplicates(relay.members, self.rows.weight)

        def add(received: Tensor) -> Handle:
            with transport.ledger.span("update rows"):
                added = sums(received)[1][: sum(part.send)]
            return send(added)

        return TwoHops(transport.all_to_all(chosen, relay.send, relay.receive, "gradients"), add)

    def _update(
        self,
        targets: Tensor,
        part: RequestPart,
        received: Tensor,
        transport: Transport,
        **options: Unpack[UpdateOptions],
    ) -> None:
        """received [sum(part.receive), width]: gradients of the part, as `_send` brought them."""
        with transport.ledger.span("update rows"):
            sum_gradients = part.sum_gradients or self._prepare_sums(targets, part)
            self.rows.update(*sum_gradients(received.to(self.rows.weight.dtype)), **options)

    def _prepare_sums(self, targets: Tensor, part: RequestPart) -> SumGradients:
        return group_duplicates(_select_served(targets, part), self.rows.weight)


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Some tensors, at least one, one after another."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _send_ids(
    ids: Tensor, about: Tensor | None, send: Sizes, receive: Sizes, transport: Transport
) -> tuple[Tensor, Tensor | None]:
    """Ids [sum(send)], and what is known about each, in one message. A collective."""
    if about is None:
        return transport.all_to_all(ids, send, receive, "ids").wait(), None
    both = torch.stack([ids, about[: len(ids)]], 1)
    arrived, about = transport.all_to_all(both, send, receive, "ids").wait().unbind(1)
    return arrived.contiguous(), about


def _select_served(numbers: Tensor, part: RequestPart) -> Tensor:
    """Out of one number for each row that is requested from this rank: those of the part."""
    return numbers if part.served is None else numbers.index_select(0, part.served)
