"""The schedule of a single rank: nothing travels, so nothing is agreed on, exchanged or overlapped
with traffic.

    batch -> local rows -> forward, backward -> row update
                                   \\-> dense optimizer

On a GPU all of it is issued on one stream, and the host reads nothing of the device: it runs ahead
of the device by up to two steps (the watch over the losses holds it there). While the device
computes, the host takes the following batch and starts its copy, on a stream of its own. Where
tables are at home in host memory, the following batch is taken before the step, and its rows become
resident while the step computes (`RowsAhead`). It trains the same bits as the serial schedule.
Batches that CUDA graphs compute are padded, and products of other sizes add up in another order:
the serial schedule for them is `SerialSingle`, which has the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.groups.local import Collected, LocalRequest
from freescale.embedding.lease import Capture
from freescale.embedding.sharded_model import ShardedModel
from freescale.embedding.tables import Tables
from freescale.ledger.ledger import Ledger
from freescale.pipeline.agreement import Agreement, agree_alone
from freescale.pipeline.captured.graphs import Graphs, can_capture
from freescale.pipeline.lane import Job, Lane, Moment
from freescale.pipeline.next_batch import check_batch, copy_to_device, count_batch
from freescale.pipeline.schedule import Schedule
from freescale.pipeline.source import BatchSource
from freescale.pipeline.step_result import StepResult
from freescale.streams import current_stream, record_event_on
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


@dataclass(eq=False)
class _Taken:
    """A batch from the data."""

    taken: SequenceBatch  # on the host, as it came
    agreement: Agreement
    batch: SequenceBatch  # on the device
    copied: torch.cuda.Event | None  # from then on; None on a CPU
    counters: dict[str, float]  # for the ledger
    rows: ResidentRows | None = None  # on their way into a cache; None: where they are read


class Single(Schedule):
    """One rank."""

    overlaps_dense = False
    replays = True  # CUDA graphs, once a size of batches has one

    def __init__(self, *arguments: Any, graphs: bool = True, **options: Any) -> None:
        """As `Schedule`. `graphs`: small batches are computed by CUDA graphs, if the model and
        the device allow it."""
        super().__init__(*arguments, **options)
        self._graphs = None
        if graphs and pads_batches(self.parallel, self.accumulate):
            self._graphs = Graphs(self, replays=self.replays)
        self._rows_ahead: RowsAhead | None = None  # once tables need it

    @property
    def _ahead(self) -> bool:
        """Whether the following batch is taken during the step: on a CPU nothing overlaps with
        the host."""
        return self.transport.device.type != "cpu"

    def _run(self, source: BatchSource) -> Iterator[StepResult]:
        ahead = self._ahead
        self.ledger.begin_step(self.steps)
        current = self._take(source)
        while current is not None:
            following = None
            if caches := ahead and self._caches:
                self._begin_rows(current)
                if (following := self._take(source)) is not None:
                    self._begin_rows(following)
            result = self._step(current)
            if ahead and not caches:
                following = self._take(source)
            self.ledger.end_step()
            yield result
            self.ledger.begin_step(self.steps)
            self.tables.lease.restore_ahead()  # which may have been read
            current = following if ahead else self._take(source)
        self.ledger.cancel_step()
        if self._failure is not None:
            raise self._failure

    def _take(self, source: BatchSource) -> _Taken | None:
        """The next batch, checked and on its way to the device; None if the data has ended or
        failed, or the run is to stop."""
        if self._failure is not None or self._stopped:
            return None
        if self._stop:
            self._stopped = True
            source.close()
            return None
        batch = agreement = None
        try:
            with self.ledger.span("await batch"):
                source.wait_for_next()
            with self.ledger.span("data"):
                batch = source.take()
                if batch is not None:
                    batch = check_batch(batch, self.tables, self.balancer)
                    agreement = agree_alone(batch)
        except Exception as error:  # noqa: BLE001 - raised after the steps before it
            self._failure = error
            batch = agreement = None
        if batch is None or agreement is None:
            source.close()
            return None
        moved = copy_to_device(batch, self.transport.device, self._copies)
        copied = record_event_on(self.transport.device, self._copies)
        feature = self.balancer.feature if self.balancer is not None else "history"
        taken = _Taken(batch, agreement, moved, copied, count_batch(batch, feature))
        self._taken.append(taken)
        self._check_agreed(agreement)
        return taken

    @property
    def _caches(self) -> bool:
        """Whether rows have to be brought into a cache; not known before tables are placed."""
        return self.tables.placed and self.tables.cached

    def _begin_rows(self, taken: _Taken) -> None:
        """Begins to make the rows of a batch resident, unless that was done."""
        if self._rows_ahead is None:
            self._rows_ahead = RowsAhead(self.tables, self.transport)
        if taken.rows is None:
            taken.rows = self._rows_ahead.begin(taken.batch, taken.copied, self._split_batch)

    def _step(self, current: _Taken) -> StepResult:
        self._taken.remove(current)
        for name, value in current.counters.items():
            self.ledger.count(name, value)
        batch = current.batch
        if current.copied is not None:
            stream = current_stream(self.transport.device)
            stream.wait_event(current.copied)
            for tensor in batch.tensors() if batch.packed is None else (batch.packed,):
                tensor.record_stream(stream)
        if not self.tables.placed:
            self.tables.place(batch)
        collected, losses = self._compute_locally(batch, current.agreement, current.rows)
        self.steps += 1
        factor = self._get_factor(self.steps)
        with self.ledger.span("update rows"):
            clip = self.tables.row_clip
            self.tables.local.update(collected, step=self.steps, factor=factor, clip=clip)
        self.buckets.start(self.transport, losses)
        self.buckets.send()
        losses = self.buckets.reduce()
        norm = self._update_dense(factor)
        return self._make_result(batch, current.agreement, losses, norm)

    def _compute_locally(
        self, batch: SequenceBatch, agreement: Agreement, rows: ResidentRows | None
    ) -> tuple[list[Collected], Tensor]:
        """Reads the rows, forward, backward: the gradients of the rows, and the losses."""
        # The first batch is checked, sample by sample: as it is. Slots of a cache are found by the
        # host: no graph knows them.
        captures = self._graphs is not None and self.steps and not self.tables.cached
        graph = self._graphs.find(batch) if self._graphs is not None and captures else None
        if graph is not None:
            with self.ledger.span("compute"), self.stopwatch.computing():
                return graph.run(batch, agreement)
        if rows is not None and self._rows_ahead is not None:
            self._rows_ahead.wait(rows, self.ledger)
            micro, requests = rows.micro, rows.requests
            opened = self.tables.local.fetch(requests)
        else:
            micro = self._split_batch(batch)
            with self.ledger.span("deduplicate"):
                opened = self.tables.local.fetch(self.tables.local.request(micro))
        self.tables.open(opened)
        losses = self._compute(micro, agreement)
        self.tables.close()
        with self.ledger.span("update rows"):
            return self.tables.local.collect(opened), losses

    # ---- between steps, and at the end

    def flush(self) -> None:
        """Nothing is deferred; but rows may be on their way into a cache, which others read."""
        if self._rows_ahead is not None:
            self._rows_ahead.wait_for_all()

    def discard(self) -> None:
        self.flush()
        for taken in self._taken:  # of tables that are about to be replaced
            if isinstance(taken, _Taken):
                taken.rows = taken.rows if self._keeps_slots else None

    @property
    def _keeps_slots(self) -> bool:
        return all(group.rows.keeps_slots for group in self.tables.groups)

    def capture(self, capture: Capture) -> None:
        self.flush()
        super().capture(capture)

    def _end_run(self) -> None:
        super()._end_run()
        if self._rows_ahead is not None:
            self._rows_ahead.rest()

    def close(self) -> None:
        super().close()
        if self._rows_ahead is not None:
            self._rows_ahead.close()
            self._rows_ahead = None


class SerialSingle(Single):
    """The oracle of one rank whose products have padded sizes: the same work on the same sizes, one
    batch after the other, launched kernel by kernel."""

    replays = False

    @property
    def _ahead(self) -> bool:
        return False


def pads_products(model: ShardedModel, accumulate: int) -> bool:
    """Whether one rank's matrix products have sizes that depend on the schedule: of batches that
    are padded for CUDA graphs, or of vectors of items, one for each row of a copy."""
    vectors: Sized = getattr(model.module, "item_vectors", ())
    return pads_batches(model, accumulate) or len(vectors) > 0


def pads_batches(model: ShardedModel, accumulate: int) -> bool:
    """Whether one rank's batches are padded for CUDA graphs."""
    return accumulate == 1 and model.transport.device.type == "cuda" and can_capture(model.module)
