"""The staged schedule: rows of the next batch come while this one computes, except those that this
one updates. Nothing is stale.

    lane `ahead`, while batch i computes                       lane `urgent`, after its backward
      b. ids of batch i+1                                        e. gradients of rows that i+1 reads too: send, update
      c. owners compare i and i+1, and say what they share       f. these rows, to their requesters
      a. gradients of i-1 that i did not need: send, update
      d. rows of i+1 that i does not read                      lane `coming`, while batch i computes
                               forward of i+1 waits for d and f      batch i+2: taken, agreed on, balanced

Every row is updated once per step, with the step number and learning rate of the step that made its
gradient; the tables are those of the serial schedule, bit for bit, once `flush` has applied what is
deferred. a before d keeps rows exact that i-1 and i+1 read, but not i; b and c do not touch the
rows, and go first because e needs what they find. The lanes are threads with channels of their own:
what is urgent does not queue behind the bulk, and the main thread waits at the next forward only,
and before the dense optimizer for what is left of its gradients' sums, which begin during the
backward, and of batch i+2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.collision import Masks, collision_masks
from freescale.embedding.exchange import Replicated, Sharded
from freescale.embedding.request import Part, Request
from freescale.ledger.ledger import Collective
from freescale.pipeline.agreement import Agreement
from freescale.pipeline.lane import Job, Lane, Moment
from freescale.pipeline.next_batch import BatchPreparation
from freescale.pipeline.schedule import Schedule, StepResult
from freescale.pipeline.source import Source
from freescale.transport.api import Transport


@dataclass
class Turn:
    """A batch on its way through the schedule."""

    batch: SequenceBatch
    agreement: Agreement
    micro: list[SequenceBatch]
    upcoming: BatchPreparation
    placed: Moment  # there is memory for its rows
    compared: Moment  # what it shares with the next batch is known
    requests: list[Request] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)  # of each sharded group, until a
    step: int = 0
    factor: float = 1.0


@dataclass
class Taking:
    """A batch that the lane `coming` brings."""

    upcoming: BatchPreparation
    agreed: Moment  # the ranks have agreed on it: all are still there
    job: Job | None = None  # until it is where it will be computed
    asked: list[Collective] = field(default_factory=list)  # collectives of the agreement
    turn: Turn | None = None  # once the job is done; None: there is no such batch, on any rank


class Staged(Schedule):
    overlaps_dense = True

    def __init__(self, *arguments: Any, masks: Masks = collision_masks, **options: Any) -> None:
        """As `Schedule`. `masks` finds the collisions (benchmarks show what happens without). A
        collective: opens three channels."""
        super().__init__(*arguments, **options)
        self.ahead = Lane("ahead", self.transport)
        self.urgent = Lane("urgent", self.transport, urgent=True)
        self.coming = Lane("coming", self.transport)
        self.lanes = (self.ahead, self.urgent, self.coming)
        self._masks = masks
        self._jobs: list[Job] = []  # of the last step
        # the last step, as long as some of its gradients are deferred
        self._unsettled: Turn | None = None
        self._taking: Taking | None = None
        self._last: BatchPreparation | None = None  # the newest batch
        self._replaced = False  # the tables, since rows were fetched ahead

    def _run(self, source: Source) -> Iterator[StepResult]:
        self.flush()
        self._last, self._replaced = None, False
        for lane in self.lanes:
            lane.side.take()
        self.ledger.begin_step(self.steps)
        self._take(source)
        turn = self._bring()
        if turn is not None:
            self._take(source)
            self._fetch_first(turn)
            coming = self._bring()
        while turn is not None:
            result, then = self._step(turn, coming, source)
            self.ledger.end_step()
            try:
                yield result
            except GeneratorExit:
                self._tell_left(source)
                raise
            self.ledger.begin_step(self.steps)
            turn, coming = coming, then
            if turn is not None:
                self._arrive(turn)
        self._take(source)  # the others may have left after the last step
        self._bring()
        self.ledger.cancel_step()
        self.flush()
        self.tables.release()
        if self._failure is not None:
            raise self._failure

    def _end_run(self) -> None:
        super()._end_run()
        # nobody may close the data while the lane reads it
        if self._taking is not None and self._taking.job is not None:
            with suppress(Exception):
                self._taking.job.wait(host=True)
        self._taking = None
        for lane in self.lanes:
            lane.rest()

    def _step(
        self, turn: Turn, coming: Turn | None, source: Source
    ) -> tuple[StepResult, Turn | None]:
        """-> also the batch after the coming one."""
        last, self._unsettled = self._unsettled, None
        self._taken.remove(turn.upcoming)
        self._jobs = [
            self.ahead.submit(
                lambda: self._while_computing(last, turn, coming), last.gradients if last else ()
            )
        ]
        self._take(source)
        turn.upcoming.count(self.ledger)
        self._compute(turn.micro, turn.agreement)
        self.steps += 1
        self.stopwatch.finish(self.steps)
        turn.step, turn.factor = self.steps, self._factor(self.steps)
        turn.gradients = [request.gradient() for _, request in self._sharded(turn)]
        self._jobs.append(
            self.urgent.submit(lambda: self._after_backward(turn, coming), turn.gradients)
        )
        self._unsettled = turn
        self._agreed()
        self._apply_replicated(turn)
        losses = self.buckets.reduce()
        norm = self._update_dense(turn.factor)
        then = self._bring()
        return self._result(turn.batch, turn.agreement, losses, norm), then

    # ---- the lanes

    def _while_computing(self, last: Turn | None, turn: Turn, coming: Turn | None) -> None:
        """a to d, on the lane `ahead`, while `turn` computes."""
        transport = self.ahead.transport
        try:
            if coming is not None:
                coming.requests = self.tables.request(coming.micro, transport)  # b
                for (group, now), (_, then) in zip(
                    self._sharded(turn), self._sharded(coming), strict=True
                ):
                    group.compare(now, then, transport, self._masks)  # c
            turn.compared.reach()
            spent = self._settle(last, transport)  # a
            if coming is None:
                return
            for group, request in self._sharded(coming):
                group.place(request, spent.pop(0) if spent else None)
                self.urgent.borrow(request.rows)
            coming.placed.reach()
        except BaseException as error:
            for moment in (turn.compared, *([coming.placed] if coming else [])):
                moment.fail(error)
            raise
        for group, request in self._sharded(coming):
            group.bring(request, request.early, transport)  # d

    def _after_backward(self, turn: Turn, coming: Turn | None) -> None:
        """e and f, on the lane `urgent`."""
        transport = self.urgent.transport
        turn.compared.wait(host=True)
        if coming is None:
            return
        for (group, request), gradient in zip(self._sharded(turn), turn.gradients, strict=True):
            # e
            group.give(request, gradient, [_known(request.shared)], transport, **self._how(turn))
        coming.placed.wait(host=True)
        for group, request in self._sharded(coming):
            group.bring(request, [_known(request.late)], transport)  # f

    # ---- verbs of the main thread

    def _take(self, source: Source) -> None:
        """The lane `coming` begins to bring the next batch."""
        # now, and not when the lane asks: of the same step on every rank
        computed = self.stopwatch.last()
        upcoming = self._upcoming(
            source, self._last, self.coming.transport, lambda: computed, ahead=True
        )
        self._last = upcoming
        taking = self._taking = Taking(upcoming, Moment(torch.device("cpu")))

        def bring() -> None:
            try:
                upcoming.agree()
            except BaseException as error:
                taking.agreed.fail(error)
                raise
            taking.asked = self.coming.side.take()
            taking.agreed.reach()
            batch, agreement = upcoming.complete()
            if agreement.ready:
                moments = Moment(self.transport.device), Moment(self.transport.device)
                taking.turn = Turn(batch, agreement, self._micro_batches(batch), upcoming, *moments)

        with torch.cuda.stream(self._copies):  # it depends on nothing that computes
            taking.job = self.coming.submit(bring)

    def _agreed(self) -> None:
        """Waits until the ranks have agreed on the next batch: who has left will not take part in
        what comes now."""
        assert self._taking is not None
        begin = self.ledger.clock.stamp()
        with self.ledger.span("await batch"):
            self._taking.agreed.wait()
        asked, self._taking.asked = self._taking.asked, []
        self.ledger.record_wait(asked, begin)

    def _bring(self) -> Turn | None:
        """Waits for the batch. None: no rank has one, or the data failed, which is raised once the
        steps before it are made."""
        taking, begin = self._taking, self.ledger.clock.stamp()
        assert taking is not None and taking.job is not None
        with self.ledger.span("await batch"):
            taking.job.wait()
        self._taking = None
        self.ledger.record_wait(taking.asked + self.coming.side.take(), begin)
        assert taking.upcoming.agreement is not None
        self._check_agreed(taking.upcoming.agreement)
        for batch in taking.turn.micro if taking.turn is not None else ():
            for tensor in batch.tensors():
                self.coming.lend(tensor)
        return taking.turn

    def _tell_left(self, source: Source) -> None:
        """The others are told that this rank has left the loop."""
        if self.transport.world == 1 or sys.is_finalizing():
            return
        computed = self.stopwatch.last()
        upcoming = self._upcoming(source, self._last, self.coming.transport, lambda: computed)
        told = self.coming.submit(lambda: upcoming.meet(left=self.steps))
        with suppress(Exception):  # nobody is there to hear it
            for job in (told, *self._jobs):
                job.wait(host=True)
        self.coming.side.take()

    def _fetch_first(self, turn: Turn) -> None:
        """The first batch: everything, blocking."""
        if not self.tables.placed:
            self.tables.place(turn.batch)
        turn.requests = self.tables.request(turn.micro)
        self.tables.fetch(turn.requests)
        for _, request in self._sharded(turn):
            self.ahead.borrow(request.owned, request.index.keys)

    def _arrive(self, turn: Turn) -> None:
        """Waits for d and f; from now on the model can read the rows of the turn."""
        begin = self.ledger.clock.stamp()
        with self.ledger.span("arrive"):
            self._finish_jobs()
        self.ledger.record_wait(self.ahead.side.take() + self.urgent.side.take(), begin)
        if self._replaced:
            self._replaced = False
            self.tables.fetch(turn.requests)
            return
        for _, request in self._sharded(turn):
            assert request.rows is not None
            self.ahead.lend(request.rows)
            request.rows.requires_grad_(True)
        for replicated, request in self._replicated(turn):
            replicated.fetch(request, self.transport, train=True)
        self.tables.open(turn.requests)
        self._count_collisions(turn)

    def _apply_replicated(self, turn: Turn) -> None:
        for group, request in self._replicated(turn):
            group.apply(request, self.transport, **self._how(turn))

    def flush(self) -> None:
        """Applies the gradients that are deferred; afterwards the tables are those of the serial
        schedule. A collective."""
        self._finish_jobs()
        last, self._unsettled = self._unsettled, None
        self._settle(last, self.transport)

    def discard(self) -> None:
        """Forgets the gradients that are deferred, and the rows that were fetched ahead. A
        collective."""
        self._finish_jobs()
        self._unsettled, self._replaced = None, True

    def close(self) -> None:
        super().close()
        for lane in self.lanes:
            lane.close()

    def _finish_jobs(self) -> None:
        """What the lanes do has changed the tables or is there."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.wait()

    # ---- verbs of both

    def _sharded(self, turn: Turn) -> list[tuple[Sharded, Request]]:
        pairs = zip(self.tables.groups, turn.requests, strict=True)
        return [(group, request) for group, request in pairs if isinstance(group, Sharded)]

    def _replicated(self, turn: Turn) -> list[tuple[Replicated, Request]]:
        pairs = zip(self.tables.groups, turn.requests, strict=True)
        return [(group, request) for group, request in pairs if isinstance(group, Replicated)]

    def _settle(self, last: Turn | None, transport: Transport) -> list[Tensor]:
        """Gradients that were deferred go to the owners, who update their rows. -> the gradients:
        their memory is free."""
        if last is None:
            return []
        gradients, last.gradients = last.gradients, []
        for (group, request), gradient in zip(self._sharded(last), gradients, strict=True):
            group.give(
                request, gradient, request.rest or [request.whole], transport, **self._how(last)
            )
        last.requests = []  # done: several numbers for each row
        return gradients

    def _how(self, turn: Turn) -> dict[str, Any]:
        """The update of the step that made the gradients, whenever it happens."""
        return {"step": turn.step, "factor": turn.factor, "clip": self.tables.row_clip}

    def _count_collisions(self, turn: Turn) -> None:
        for _, request in self._sharded(turn):
            self.ledger.count("requests", request.owned.numel())
            self.ledger.count("collisions", sum(_known(request.late).receive))


def _known(part: Part | None) -> Part:
    assert part is not None, "the requests were not compared"
    return part
