"""Rows of a single rank whose tables are not at home on the device: those of the following batch
become resident, in lane `ahead`, while the current batch computes.

Staged has a lane for it anyway; on one rank nothing else travels. Jobs are in the order of the
batches, so that the cache makes the decisions of the serial schedule.

The job of batch i+1 is given to the lane before step i is issued, when step i-1 may still be on the
device. It waits for step i-2 only: rows that make room were last used there or earlier, and no step
after it touches them or their slots. So a job has almost two steps before a step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from freescale.batch import SequenceBatch
from freescale.embedding.groups.local import LocalRequest
from freescale.embedding.tables import Tables
from freescale.ledger.ledger import Ledger
from freescale.pipeline.lane import Job, Lane, Moment
from freescale.streams import current_stream
from freescale.transport.api import Transport


class ResidentRows:
    """The rows of a batch, on their way into the cache."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.micro: list[SequenceBatch] = []
        self.requests: list[LocalRequest] = []


class RowsAhead:
    """The lane of a single rank."""

    def __init__(self, tables: Tables, transport: Transport) -> None:
        self._tables, self._lane = tables, Lane("ahead", transport)
        self._jobs: list[Job] = []  # not waited for
        # The step before the last one was issued by then. None: whoever waited for all jobs may
        # have written to the tables since.
        self._before: Moment | None = None

    def begin(
        self,
        batch: SequenceBatch,
        copied: torch.cuda.Event | None,
        split: Callable[[SequenceBatch], list[SequenceBatch]],
    ) -> ResidentRows:
        """Begins to make the rows of a batch resident, which is on the device from `copied` on.
        `split` cuts it into micro-batches."""
        rows = ResidentRows()

        def prepare() -> None:
            """On the thread and stream of the lane."""
            if copied is not None:
                current_stream(self._lane.device).wait_event(copied)
            rows.micro = split(batch)
            rows.requests = self._tables.local.request(rows.micro, self._lane.transport)

        tensors = list(batch.tensors()) if batch.packed is None else [batch.packed]
        now = Moment(self._lane.device)
        now.reach()
        rows.job = self._lane.submit(prepare, tensors, self._before or now)
        self._before = now
        self._jobs.append(rows.job)
        return rows

    def wait(self, rows: ResidentRows, ledger: Ledger) -> None:
        """The main thread and its stream wait for the rows of a batch."""
        assert rows.job is not None
        with ledger.span("arrive"):
            rows.job.wait()
        self._jobs.remove(rows.job)
        for request in rows.requests:
            for tensor in request.list_tensors():
                self._lane.lend(tensor)
        for batch in rows.micro:
            for tensor in batch.tensors():
                self._lane.lend(tensor)

    def wait_for_all(self) -> None:
        """The caller's thread and stream go on after all that was begun: it may read the tables.
        What went wrong is raised by the step that needs the rows."""
        self._before = None
        for job in self._jobs:
            with suppress(Exception):
                job.wait()

    def rest(self) -> None:
        """However a run ended: nothing is under way any more."""
        self.wait_for_all()
        self._jobs.clear()
        self._lane.rest()

    def close(self) -> None:
        self._lane.close()
