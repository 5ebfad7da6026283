"""The stages of the staged schedule that exchange rows (see staged.py), and which machines run them
where. Each runs on the thread and stream of the lane that it names, over its channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from freescale.embedding.collision import Masks, collision_masks, is_few
from freescale.embedding.groups.sharded import Sharded
from freescale.embedding.request import Requested
from freescale.embedding.rows import TrainingRows
from freescale.embedding.tables import Tables
from freescale.pipeline.in_flight import RowUpdates, StagedBatch
from freescale.pipeline.lane import Lane
from freescale.transport.api import Transport


class Stage(Enum):
    """What happens to rows in lane `ahead` besides the traffic of rows itself."""

    REQUEST = 1  # the owners learn which rows the following batch reads
    COMPARE = 2  # the owners compare the current batch with it
    RESOLVE = 3  # the owners make its rows resident


@dataclass(frozen=True)
class StagePlan:
    """The stages of lane `ahead` that touch no row, around the deferred gradients."""

    device: torch.device
    nearby: bool
    request_lane: str  # `ahead`, or `input`, which requests rows a step earlier
    before: tuple[Stage, ...]  # the deferred gradients set off
    meanwhile: tuple[Stage, ...]  # the first of them are on their way
    resolve_in_compare: bool  # rows become resident while the device compares
    prepare_at_once: bool  # lane `input` plans from the forward on, not from its end

    def divides(self, current: int, following: int) -> bool:
        """Whether two consecutive batches are divided by the rows that they share. The arguments
        are the bytes that a rank reads for each. Dividing a few rows on a CPU would cost more time
        than it hides."""
        few = (is_few(size, self.device, self.nearby) for size in (current, following))
        return not all(few)


def plan_stages(device: torch.device, nearby: bool) -> StagePlan:
    """Plans a step.

    Args:
        device: of the ranks.
        nearby: whether all ranks are on one machine.

    On CPUs, owners compare before the deferred gradients set off: the urgent ones depend on the
    result, and the messages would queue behind the bulk on a slow link. On GPUs, where computing
    takes longer than messages, they compare meanwhile.

    On GPUs, and between machines, lane `input` requests rows, a step earlier. Between machines a
    message takes as long as many rows, and the link would be idle while a step begins with two of
    them. On a GPU the host waits for the device to count the ids for each owner, which would stall
    lane `ahead`. Lane `ahead` requests the first batches in any case: tables are placed when the
    first one is here.

    Lane `input` plans and packs in Python. On a GPU it does so after the forward, whose launches
    need the interpreter more than the backward's; on a CPU it has the whole step.
    """
    on_host = device.type == "cpu"
    search = (Stage.REQUEST, Stage.COMPARE)
    return StagePlan(
        device=device,
        nearby=nearby,
        request_lane="ahead" if on_host and nearby else "input",
        before=search if on_host else (),
        meanwhile=(Stage.RESOLVE,) if on_host else search,
        resolve_in_compare=not on_host,
        prepare_at_once=on_host,
    )


class RowStages:
    """Stages 1 to 4 are those of lane `ahead`, 5 and 6 of lane `urgent`."""

    def __init__(
        self, tables: Tables, ahead: Lane, urgent: Lane, masks: Masks, plan: StagePlan
    ) -> None:
        self._tables, self._ahead, self._urgent = tables, ahead, urgent
        self._masks, self._plan = masks, plan

    def find_shared(
        self, stages: tuple[Stage, ...], current: StagedBatch, following: StagedBatch | None
    ) -> None:
        """Runs stages that send no row, lane `ahead`. Without a batch that follows, `current` is
        compared at once."""
        run: dict[Stage, Callable[[StagedBatch], None]] = {
            Stage.REQUEST: self.request_ids,
            Stage.COMPARE: partial(self.compare, current),
            Stage.RESOLVE: self.resolve,
        }
        for stage in stages:
            if following is not None:
                run[stage](following)
            if stage is Stage.COMPARE:
                current.compared.reach()

    def request_ids(self, following: StagedBatch) -> None:
        """Stage 1, lane `ahead`, unless lane `input` does it: deduplicates the ids and sends them
        to the owners of the rows."""
        following.requested.wait(host=True)
        if not following.requests:
            transport = self._ahead.transport
            following.requests = self._tables.set.request(following.micro, transport)
        for _, request in self._pair(following):
            self._ahead.borrow(*request.list_tensors())

    def compare(self, current: StagedBatch, following: StagedBatch) -> None:
        """Stage 2, lane `ahead`: the owners tell both requesters which rows the batches share."""
        transport = self._ahead.transport
        for number, (group, request) in enumerate(self._pair(following)):
            before = current.requests[number]
            gradients, rows = group.compare(
                (before, current.residents[number]),
                request,
                transport,
                self._masks,
                divides=self._divides(before, request),
                meanwhile=partial(self._resolve, group, request, following)
                if self._plan.resolve_in_compare
                else lambda: None,
            )
            current.updates.urgent.append(gradients.urgent)
            current.updates.deferred[number] = gradients.deferred
            following.row_parts.append(rows)

    def _divides(self, current: Requested, following: Requested) -> bool:
        """Other masks than those of collisions are for benchmarks, which show what they do."""
        other = self._masks is not collision_masks
        return other or self._plan.divides(current.bytes, following.bytes)

    def resolve(self, following: StagedBatch) -> None:
        """At the beginning of stage 3, lane `ahead` of a CPU: the owners bring the rows to where it
        reaches them. Those of `current` and of the batch before stay there: their gradients are on
        the way."""
        for group, request in self._pair(following):
            self._resolve(group, request, following)

    def _resolve(self, group: Sharded, request: Requested, following: StagedBatch) -> None:
        following.residents.append(group.resolve(request, self._ahead.transport))

    def push_deferred_gradients(
        self,
        previous: RowUpdates | None,
        transport: Transport,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Tensor]:
        """Stage 3, lane `ahead` (or, at a flush, the main thread): the deferred gradients go to the
        owners, who update their rows. Calls `meanwhile` while the first are on their way. Returns
        the gradients of all groups: their memory is free."""
        gradients: list[Tensor] = []
        if previous is not None:
            gradients, previous.gradients = previous.gradients, []
            sharded, targets = self._tables.set.sharded, previous.targets
            together = zip(sharded, targets, gradients, previous.deferred, strict=True)
            for group, own, gradient, parts in together:
                group.push_gradients(own, gradient, parts, transport, meanwhile, **previous.options)
                meanwhile = None
            previous.clear()
        if meanwhile is not None:
            meanwhile()
        return gradients

    def allocate_rows(self, following: StagedBatch, spent: list[Tensor]) -> None:
        """Between stages 3 and 4, lane `ahead`: memory for the rows, out of the spent gradients."""
        for group, request in self._pair(following):
            rows = group.allocate_rows(request, spent.pop(0) if spent else None)
            self._urgent.borrow(rows)
            following.arriving.append(rows)

    def pull_early_rows(self, following: StagedBatch) -> None:
        """Stage 4, lane `ahead`: the rows that do not collide."""
        for number, group in enumerate(self._tables.set.sharded):
            resident, rows = following.residents[number], following.arriving[number]
            early = following.row_parts[number].early
            group.pull_rows(resident, rows, early, self._ahead.transport)
            if resident.log_q is not None:
                resident.log_q.wait()

    def push_urgent_gradients(self, updates: RowUpdates) -> None:
        """Stage 5, lane `urgent`: gradients of the rows that the following batch reads too."""
        for number, group in enumerate(self._tables.set.sharded):
            group.push_gradients(
                updates.targets[number],
                updates.gradients[number],
                [updates.urgent[number]],
                self._urgent.transport,
                **updates.options,
            )

    def pull_late_rows(self, following: StagedBatch) -> None:
        """Stage 6, lane `urgent`: the rows that collide, after their update."""
        for number, group in enumerate(self._tables.set.sharded):
            late = [following.row_parts[number].late]
            resident, rows = following.residents[number], following.arriving[number]
            group.pull_rows(resident, rows, late, self._urgent.transport)

    # ---- the main thread

    def fetch(self, batch: StagedBatch, transport: Transport) -> list[TrainingRows]:
        """Fetches all rows of a batch that is requested, blocking. They are resolved again where
        the tables have been replaced since, unless their slots are the same."""
        pairs, before = list(self._pair(batch)), batch.residents
        batch.residents = [
            before[number]
            if before and group.rows.keeps_slots
            else group.resolve(request, transport)
            for number, (group, request) in enumerate(pairs)
        ]
        return [
            group.fetch_resident(request, resident, transport)
            for (group, request), resident in zip(pairs, batch.residents, strict=True)
        ]

    def open_rows(self, batch: StagedBatch, transport: Transport) -> list[TrainingRows]:
        """Stages 4 and 6 have brought the rows."""
        opened = []
        for number, (group, request) in enumerate(self._pair(batch)):
            resident, rows = batch.residents[number], batch.arriving[number]
            self._ahead.lend(rows)
            if resident.log_q is not None:
                self._ahead.lend(resident.log_q.wait())
            opened.append(group.open(request, resident, rows, transport))
        return opened

    def _pair(self, batch: StagedBatch) -> Iterator[tuple[Sharded, Requested]]:
        """The sharded groups, which come first, with their requests."""
        return zip(self._tables.set.sharded, batch.requests, strict=False)
