"""The staged schedule: rows of the following batch travel while the current one computes, except
those that the current one updates. No row is stale: once `flush` has applied the deferred
gradients, the tables equal those of the serial schedule bit for bit (docs/how/staged.md).

    lane `ahead`, while batch i computes                lane `urgent`, after the backward of i
      1. ids of batch i+1: deduplicate, AllToAll          5. urgent gradients of i, of rows that
      2. owners compare i and i+1                            i+1 reads too: AllToAll, update
      3. deferred gradients of i-1: AllToAll, update      6. rows of i+1 that collide, once they
      4. rows of i+1 that do not collide: AllToAll           have memory (before 4): AllToAll
                                                        lane `input`, while batch i computes
    main thread                                           batch i+2: taken, agreed on, balanced
      forward, backward, dense optimizer of i; then waits for i+2, and for 4 and 6

A row of i+1 collides if batch i reads it too: it waits for i's update. The gradients of i are
urgent for these rows. For all others they are deferred to stage 3 of step i+1: batch i+1 does not
read these rows, so 5 may overtake 3. Stages 1 and 2 run earlier on some machines (`StagePlan`);
if lane `input` does stage 1, it requests i+2 as soon as that batch is there.

Between stages 3 and 5 of step i the rows are those after step i-1. There an asynchronous checkpoint
has them copied, in lane `ahead`, and on such steps stage 5 waits for the copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from freescale.batch import SequenceBatch
from freescale.embedding.collision import Masks, collision_masks
from freescale.embedding.lease import Capture
from freescale.embedding.rows import TrainingRows
from freescale.pipeline.in_flight import IncomingBatch, InFlight, RowUpdates, StagedBatch
from freescale.pipeline.lane import Lane, Moment
from freescale.pipeline.next_batch import BatchPreparation
from freescale.pipeline.process_memory import share_heap, trim_heap
from freescale.pipeline.row_stages import RowStages, plan_stages
from freescale.pipeline.schedule import Schedule
from freescale.pipeline.source import BatchSource
from freescale.pipeline.step_result import StepResult
from freescale.transport.api import is_nearby


class Staged(Schedule):
    """Four batches at a time: row updates of the `previous` one are deferred, the `current` one
    computes, the `following` one fetches its rows, and one more is `incoming`. None where there is
    no such batch."""

    overlaps_dense = True

    def __init__(self, *arguments: Any, masks: Masks = collision_masks, **options: Any) -> None:
        """As `Schedule`. `masks` finds the collisions (benchmarks show what happens without). A
        collective: opens three channels."""
        super().__init__(*arguments, **options)
        self._on_host = self.transport.device.type == "cpu"
        self._plan = plan_stages(self.transport.device, is_nearby(self.transport))
        if self._on_host:
            share_heap()  # before the lanes' threads have heaps of their own
        self.ahead = Lane("ahead", self.transport)
        self.urgent = Lane("urgent", self.transport, urgent=True)
        self.input = Lane("input", self.transport)
        self.lanes = (self.ahead, self.urgent, self.input)
        self._stages = RowStages(self.tables, self.ahead, self.urgent, masks, self._plan)
        self._in_flight = InFlight()

    # ---- the main thread

    def _run(self, source: BatchSource) -> Iterator[StepResult]:
        self._in_flight = InFlight()
        for lane in self.lanes:
            lane.side.take()
        self.ledger.begin_step(self.steps)
        self._begin_input(source)
        current, following = self._await_input(), None
        if current is not None:
            self._begin_input(source).proceed()
            self._fetch_first(current)
            following = self._await_input()
        while current is not None:
            result, after = self._step(current, following, source)
            self.ledger.end_step()
            try:
                yield result
            except GeneratorExit:
                self._announce_leaving(source)
                raise
            self.ledger.begin_step(self.steps)
            current, following = following, after
            if current is not None:
                self._await_rows(current)
        self._begin_input(source)  # the others may have left after the last step
        self._await_input()
        self.ledger.cancel_step()
        self.flush()
        if self._failure is not None:
            raise self._failure

    def _step(
        self, current: StagedBatch, following: StagedBatch | None, source: BatchSource
    ) -> tuple[StepResult, StagedBatch | None]:
        """Returns the result of `current`, and the batch after `following`."""
        in_flight = self._in_flight
        previous, captures = in_flight.pop_deferred(), in_flight.take_captures()
        current.begin(Moment(self.transport.device) if captures else None)
        self._taken.remove(current.preparation)
        run = partial(self._run_ahead, previous, captures, current, following)
        in_flight.jobs = [self.ahead.submit(run, previous.gradients if previous else ())]
        del previous, run  # the lane has it, and lets it go before the backward needs most memory
        current.preparation.count(self.ledger)
        incoming = self._begin_input(source)
        if self._plan.prepare_at_once:
            incoming.proceed()
        self._compute(current.micro, current.agreement, incoming.proceed)
        self.steps += 1
        self.stopwatch.finish(self.steps)
        factor = self._get_factor(self.steps)
        updates = in_flight.deferred = current.updates
        updates.options = {"step": self.steps, "factor": factor, "clip": self.tables.row_clip}
        self.tables.close()
        current.pop_gradients()
        in_flight.jobs.append(
            self.urgent.submit(lambda: self._run_urgent(current, following), updates.gradients)
        )
        # On i+2: a rank that has left the loop takes part in no further collective.
        in_flight.wait_for_agreement(self.ledger)
        for group, rows in zip(self.tables.set.replicated, current.replicated, strict=True):
            group.update(group.collect(rows, self.transport), self.transport, **updates.options)
        losses = self.buckets.reduce()
        norm = self._update_dense(factor)
        after = self._await_input()
        return self._make_result(current.batch, current.agreement, losses, norm), after

    # ---- lane `ahead`: stages 1 to 4, on its thread and stream, over its channel

    def _run_ahead(
        self,
        previous: RowUpdates | None,
        captures: list[Capture],
        current: StagedBatch,
        following: StagedBatch | None,
    ) -> None:
        """Runs during the forward and backward of `current`."""
        try:
            self._stages.find_shared(self._plan.before, current, following)
            meanwhile = partial(self._stages.find_shared, self._plan.meanwhile, current, following)
            spent = self._stages.push_deferred_gradients(previous, self.ahead.transport, meanwhile)
            if current.captured is not None:  # all of i-1 is applied, nothing of i
                for capture in captures:
                    capture.make()
                current.captured.reach()
            if following is None:
                return
            self._stages.allocate_rows(following, spent)
            following.allocated.reach()
        except BaseException as error:  # lane `urgent` and writers of checkpoints wait for these
            allocated = following.allocated if following is not None else None
            for moment in (current.compared, current.captured, allocated, *captures):
                if moment is not None:
                    moment.fail(error)
            raise
        self._stages.pull_early_rows(following)
        if self._on_host:
            trim_heap(sum(rows.numel() * rows.element_size() for rows in following.arriving))

    # ---- lane `urgent`: stages 5 and 6, on its thread and stream, over its channel

    def _run_urgent(self, current: StagedBatch, following: StagedBatch | None) -> None:
        """Runs after the backward of `current`, during the dense sums and the dense optimizer."""
        current.compared.wait(host=True)
        if following is None:
            return
        if current.captured is not None:
            current.captured.wait(host=True)
        self._stages.push_urgent_gradients(current.updates)
        following.allocated.wait(host=True)
        self._stages.pull_late_rows(following)

    # ---- lane `input`, as the main thread uses it

    def _prepare_next(self, source: BatchSource, *, ahead: bool) -> BatchPreparation:
        # Read here and not in the lane: the same step on every rank. While a step begins, a GPU may
        # still be at the one that the host has just finished.
        computed = self.stopwatch.last(before=not self._on_host)
        newest, transport = self._in_flight.newest, self.input.transport
        return self._prepare_batch(source, newest, transport, lambda: computed, ahead)

    def _begin_input(self, source: BatchSource) -> IncomingBatch:
        """Lane `input` begins to prepare the next batch."""
        preparation = self._in_flight.newest = self._prepare_next(source, ahead=True)
        # the job must not wait for the compute
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            incoming = self._in_flight.incoming = IncomingBatch(
                preparation, self.input, self._split_batch, self._choose_request()
            )
        return incoming

    def _choose_request(self) -> Callable[[list[SequenceBatch]], list[Any]] | None:
        """Stage 1, if lane `input` does it. The first batches find no tables."""
        if self._plan.request_lane == "input" and self.tables.placed:
            return partial(self.tables.set.request, transport=self.input.transport)
        return None

    def _await_input(self) -> StagedBatch | None:
        """Waits for the incoming batch. None if no rank has one, or if the data failed, which is
        raised after the steps before it."""
        incoming = self._in_flight.incoming
        assert incoming is not None
        incoming.proceed()
        batch, agreement = incoming.wait(self.ledger)
        self._check_agreed(agreement)
        return batch

    def _announce_leaving(self, source: BatchSource) -> None:
        """Tells the other ranks that this one has left the loop."""
        if self.transport.world == 1 or sys.is_finalizing():
            return
        preparation = self._prepare_next(source, ahead=False)
        self._in_flight.announce_leaving(preparation, self.steps, self.input)

    # ---- rows, as the main thread uses them

    def _fetch_first(self, current: StagedBatch) -> None:
        """Fetches all rows of the first batch, blocking."""
        if not self.tables.placed:
            self.tables.place(current.batch)
        begin = self.ledger.clock.stamp()
        current.requested.wait()
        self.ledger.record_wait(current.requesting, begin)
        current.requests = current.requests or self.tables.set.request(current.micro)
        self._open(current, self._stages.fetch(current, self.transport))
        for request, resident in zip(current.requests, current.residents, strict=False):
            self.ahead.borrow(request.owned, resident.slots, resident.targets, request.index.keys)

    def _await_rows(self, current: StagedBatch) -> None:
        """Waits for stages 4 and 6; from now on the model can read the rows of `current`."""
        begin = self.ledger.clock.stamp()
        with self.ledger.span("arrive"):
            self._in_flight.wait_for_jobs()
        sides = self.ahead.side.take() + self.urgent.side.take()
        self.ledger.record_wait(current.requesting + sides, begin)
        if self._in_flight.replaced:
            self._in_flight.replaced = False
            return self._open(current, self._stages.fetch(current, self.transport))
        for request, parts in zip(current.requests, current.row_parts, strict=False):
            self.ledger.count("requests", request.owned.numel())
            self.ledger.count("collisions", parts.collisions)
        self._open(current, self._stages.open_rows(current, self.transport))

    def _open(self, current: StagedBatch, rows: list[TrainingRows]) -> None:
        """The model can read these rows of the sharded groups, and the replicated ones."""
        pairs = zip(self.tables.set.replicated, current.requests[len(rows) :], strict=True)
        current.replicated = [
            group.fetch(request, self.transport, train=True) for group, request in pairs
        ]
        current.sharded, current.arriving, current.row_parts = rows, [], []
        self.tables.open([*rows, *current.replicated])

    # ---- between steps, and at the end

    def flush(self) -> None:
        """Applies the deferred gradients: afterwards the tables are those of the serial schedule. A
        collective."""
        self._in_flight.wait_for_all()
        self._stages.push_deferred_gradients(self._in_flight.pop_deferred(), self.transport)
        for capture in self._in_flight.take_captures():
            capture.make()

    def capture(self, capture: Capture) -> None:
        """The lane `ahead` copies the rows in the next step, behind stage 3; lane `urgent` waits
        for it with stage 5. Without a next step, `flush` does."""
        self._in_flight.captures.append(capture)
        if self._in_flight.deferred is None:
            self.flush()

    def finish_captures(self) -> None:
        """Makes copies for which no step has come. A collective."""
        if self._in_flight.captures:
            self.flush()

    def discard(self) -> None:
        """Forgets the deferred gradients and the rows that were pulled ahead. A collective."""
        self.finish_captures()
        self._in_flight.wait_for_all()
        self._in_flight.pop_deferred()
        self._in_flight.replaced = True

    def _end_run(self) -> None:
        super()._end_run()
        # A rank that fails in a divided history leaves others in it, which prepare no next batch.
        self._in_flight.finish_input(wait=self.parts is None or not self.parts.begun)
        for lane in self.lanes:
            lane.rest()

    def close(self) -> None:
        super().close()
        for lane in self.lanes:
            lane.close()
