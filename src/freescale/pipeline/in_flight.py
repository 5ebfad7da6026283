"""Batches on their way through the staged schedule, and what it has begun but not finished."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.groups.local import ReplicatedRows
from freescale.embedding.lease import Capture
from freescale.embedding.request import Requested, RequestPart, Resident, RowParts
from freescale.embedding.rows import TrainingRows
from freescale.embedding.storage.api import UpdateOptions
from freescale.ledger.ledger import Collective, Ledger
from freescale.pipeline.agreement import Agreement
from freescale.pipeline.lane import Job, Lane, Moment
from freescale.pipeline.next_batch import BatchPreparation


@dataclass
class RowUpdates:
    """The row updates of a step, of each sharded group. They outlive the batch, whose ids and keys
    take as much memory as they do."""

    targets: list[Tensor]  # [r] of the rows that this rank serves: those of `Resident`
    deferred: list[list[RequestPart]]  # all rows, until the following batch is compared
    urgent: list[RequestPart] = field(default_factory=list)  # none, unless a batch follows
    gradients: list[Tensor] = field(default_factory=list)  # [u, width], until the last is sent
    options: UpdateOptions = field(init=False)  # of the step, from the end of its backward on

    def clear(self) -> None:
        """All rows are updated."""
        self.targets, self.deferred, self.urgent = [], [], []


@dataclass
class StagedBatch:
    """A batch that all ranks have agreed on, from its request for rows to the end of its step."""

    batch: SequenceBatch
    agreement: Agreement
    micro: list[SequenceBatch]
    preparation: BatchPreparation
    allocated: Moment  # its rows have memory: both lanes may fill it
    compared: Moment  # the rows that it shares with the following batch are known
    requested: Moment  # lane `input` has requested its rows, unless another lane does
    requesting: list[Collective] = field(default_factory=list)  # collectives of lane `input` for it
    requests: list[Any] = field(default_factory=list)  # one per group of tables
    # Of each sharded group, filled by the stages as they come:
    residents: list[Resident] = field(default_factory=list)
    row_parts: list[RowParts] = field(default_factory=list)
    arriving: list[Tensor] = field(default_factory=list)  # [u, width]: memory of the rows
    # From the beginning of its step on:
    captured: Moment | None = field(init=False)  # the rows of the step before are copied, if wanted
    updates: RowUpdates = field(init=False)
    # Rows of each group, while the model can read them:
    sharded: list[TrainingRows] = field(default_factory=list)
    replicated: list[ReplicatedRows] = field(default_factory=list)

    def begin(self, captured: Moment | None) -> None:
        """Its step begins: all rows are here."""
        self.captured = captured
        requests: list[Requested] = self.requests[: len(self.residents)]
        self.updates = RowUpdates(
            [resident.targets for resident in self.residents],
            [[request.whole] for request in requests],
        )

    def pop_gradients(self) -> None:
        """The gradients of sharded groups take the place of their rows, one by one."""
        while self.sharded:
            self.updates.gradients.append(self.sharded.pop(0).pop_gradient())


class IncomingBatch:
    """A batch that the lane `input` prepares."""

    def __init__(
        self,
        preparation: BatchPreparation,
        lane: Lane,
        split: Callable[[SequenceBatch], list[SequenceBatch]],
        request: Callable[[list[SequenceBatch]], list[Any]] | None = None,
    ) -> None:
        """Submits the preparation to `lane`, which takes the batch from the data and waits for
        `proceed`; `split` cuts the batch into micro-batches, and `request`, if this lane is to do
        that, asks the owners for their rows."""
        self._proceeds = threading.Event()
        self.taken = Moment(torch.device("cpu"))  # from the data
        self.agreed = Moment(torch.device("cpu"))  # the ranks have agreed: none has left
        self._completed = Moment(lane.device)  # the batch is here; its rows are not requested yet
        self._preparation, self._lane, self._split = preparation, lane, split
        self._request = request
        self._agreeing: list[Collective] = []  # collectives of the agreement, ...
        self._completing: list[Collective] = []  # ... and those after it, up to the batch
        self._batch: StagedBatch | None = None  # once it is here; None: the data has ended
        self.job: Job = lane.submit(self._prepare)

    def proceed(self) -> None:
        """From now on the lane may plan and pack."""
        self._proceeds.set()

    def wait_for_agreement(self, ledger: Ledger) -> None:
        """The main thread waits until the ranks have agreed on the batch."""
        begin = ledger.clock.stamp()
        with ledger.span("await batch"):
            self.agreed.wait()
        collectives, self._agreeing = self._agreeing, []
        ledger.record_wait(collectives, begin)

    def wait(self, ledger: Ledger) -> tuple[StagedBatch | None, Agreement]:
        """The main thread and its stream wait for the batch, not for the request of its rows; None
        if there is none, on any rank."""
        begin = ledger.clock.stamp()
        with ledger.span("await batch"):
            self._completed.wait()
        ledger.record_wait(self._agreeing + self._completing, begin)
        for batch in self._batch.micro if self._batch is not None else ():
            for tensor in batch.tensors():
                self._lane.lend(tensor)
        assert self._preparation.agreement is not None
        return self._batch, self._preparation.agreement

    def _prepare(self) -> None:
        """On the thread and stream of the lane, over its channel."""
        with self._completed.reached_by():
            with self.agreed.reached_by():
                with self.taken.reached_by():
                    self._preparation.take()
                self._proceeds.wait()
                self._preparation.agree()
                self._agreeing = self._lane.side.take()
            batch, agreement = self._preparation.complete()
            if agreement.ready:
                device = self._lane.device
                self._batch = StagedBatch(
                    batch,
                    agreement,
                    self._split(batch),
                    self._preparation,
                    allocated=Moment(device),
                    compared=Moment(device),
                    requested=Moment(device),
                )
            self._completing = self._lane.side.take()
        if self._batch is not None:
            with self._batch.requested.reached_by():
                if self._request is not None:
                    self._batch.requests = self._request(self._batch.micro)
                    self._batch.requesting = self._lane.side.take()


@dataclass
class InFlight:
    """What the schedule has begun and not finished."""

    jobs: list[Job] = field(default_factory=list)  # of the lanes `ahead` and `urgent`
    deferred: RowUpdates | None = None  # the last step's, while some gradients are deferred
    incoming: IncomingBatch | None = None  # what the lane `input` prepares, or has prepared last
    newest: BatchPreparation | None = None  # of the last batch that was begun
    replaced: bool = False  # the tables were replaced after rows were pulled ahead
    captures: list[Capture] = field(default_factory=list)  # of the rows after the last step

    def pop_deferred(self) -> RowUpdates | None:
        """The deferred updates, which the caller applies or forgets."""
        taken, self.deferred = self.deferred, None
        return taken

    def take_captures(self) -> list[Capture]:
        """The copies to be made, which the caller makes."""
        taken, self.captures = self.captures, []
        return taken

    def wait_for_agreement(self, ledger: Ledger) -> None:
        """Waits until the ranks have agreed on the incoming batch."""
        assert self.incoming is not None
        self.incoming.wait_for_agreement(ledger)

    def wait_for_jobs(self) -> None:
        """The caller's thread and stream go on after the jobs of both lanes."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job.wait()

    def wait_for_all(self) -> None:
        """Waits for the jobs of all three lanes, between steps. Afterwards the caller may change
        the tables."""
        self.wait_for_jobs()
        if self.incoming is not None:
            self.incoming.job.wait()

    def finish_input(self, wait: bool = True) -> None:
        """Waits until the lane `input` has ended: the caller may close the data, which it reads.
        Unless `wait`, until it has read."""
        if self.incoming is not None:
            self.incoming.proceed()
            with suppress(Exception):
                (self.incoming.job if wait else self.incoming.taken).wait(host=True)
        self.incoming = None

    def announce_leaving(self, preparation: BatchPreparation, step: int, lane: Lane) -> None:
        """Tells the other ranks, in the place of their next agreement, that this rank has left the
        loop after `step`; then waits for all jobs."""
        announcement = lane.submit(lambda: preparation.meet(left=step))
        with suppress(Exception):  # the others may have ended already
            for job in (announcement, *self.jobs):
                job.wait(host=True)
        lane.side.take()
