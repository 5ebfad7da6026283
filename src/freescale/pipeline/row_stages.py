"""The six stages of the staged schedule that exchange rows (see staged.py): each is a method, which
runs on the thread and stream of the lane that it names, over its channel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from freescale.embedding.collision import Masks
from freescale.embedding.exchange import Sharded
from freescale.embedding.request import Request, require
from freescale.embedding.tables import Tables
from freescale.pipeline.in_flight import StagedBatch
from freescale.pipeline.lane import Lane
from freescale.transport.api import Transport


class RowStages:
    """Stages 1 to 4 are those of lane `ahead`, 5 and 6 of lane `urgent`."""

    def __init__(self, tables: Tables, ahead: Lane, urgent: Lane, masks: Masks) -> None:
        self._tables, self._ahead, self._urgent, self._masks = tables, ahead, urgent, masks

    def request_ids(self, following: StagedBatch) -> None:
        """Stage 1, lane `ahead`, unless lane `input` does it: deduplicates the ids and sends them
        to the owners of the rows."""
        following.requested.wait(host=True)
        if not following.requests:
            following.requests = self._tables.request(following.micro, self._ahead.transport)
        for _, request in self._pair(following):
            self._ahead.borrow(*request.list_tensors())

    def compare(self, current: StagedBatch, following: StagedBatch, brings: bool) -> None:
        """Stage 2, lane `ahead`: the owners tell both requesters which rows the batches share. With
        `brings`, for a GPU, they make the rows resident while the device compares."""
        transport = self._ahead.transport
        pairs = zip(self._pair(current), self._pair(following), strict=True)
        for (group, now), (_, then) in pairs:
            bring = partial(group.make_resident, then, transport) if brings else None
            group.compare(now, then, transport, self._masks, bring)

    def make_resident(self, following: StagedBatch | None) -> None:
        """At the beginning of stage 3, lane `ahead` of a CPU: the owners bring the rows to where it
        reaches them. Those of `current` and of the batch before stay there: their gradients are on
        the way."""
        if following is None:
            return
        for group, request in self._pair(following):
            group.make_resident(request, self._ahead.transport)

    def push_deferred_gradients(
        self,
        previous: StagedBatch | None,
        transport: Transport,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Tensor]:
        """Stage 3, lane `ahead` (or, at a flush, the main thread): the deferred gradients go to the
        owners, who update their rows. Calls `meanwhile` while the first are on their way. Returns
        the gradients of all groups: their memory is free."""
        gradients: list[Tensor] = []
        if previous is not None:
            gradients, previous.gradients = previous.gradients, []
            for (group, request), gradient in zip(self._pair(previous), gradients, strict=True):
                deferred = [request.whole] if request.deferred is None else request.deferred
                group.push_gradients(
                    request, gradient, deferred, transport, meanwhile, **previous.update
                )
                meanwhile = None
            previous.requests = []  # done: several numbers for each row
        if meanwhile is not None:
            meanwhile()
        return gradients

    def allocate_rows(self, following: StagedBatch, spent: list[Tensor]) -> None:
        """Between stages 3 and 4, lane `ahead`: memory for the rows, out of the spent gradients."""
        for group, request in self._pair(following):
            group.allocate_rows(request, spent.pop(0) if spent else None)
            self._urgent.borrow(request.rows)

    def pull_early_rows(self, following: StagedBatch) -> None:
        """Stage 4, lane `ahead`: the rows that do not collide."""
        for group, request in self._pair(following):
            group.pull_rows(request, request.early, self._ahead.transport)
            request.await_log_q()

    def push_urgent_gradients(self, current: StagedBatch) -> None:
        """Stage 5, lane `urgent`: gradients of the rows that the following batch reads too."""
        pairs = zip(self._pair(current), current.gradients, strict=True)
        for (group, request), gradient in pairs:
            urgent, transport = [require(request.urgent)], self._urgent.transport
            group.push_gradients(request, gradient, urgent, transport, **current.update)

    def pull_late_rows(self, following: StagedBatch) -> None:
        """Stage 6, lane `urgent`: the rows that collide, after their update."""
        for group, request in self._pair(following):
            group.pull_rows(request, [require(request.late)], self._urgent.transport)

    def _pair(self, batch: StagedBatch) -> list[tuple[Sharded, Request]]:
        return self._tables.pair_sharded(batch.requests)
