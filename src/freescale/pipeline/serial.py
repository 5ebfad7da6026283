"""The serial schedule: nothing overlaps. The oracle of every test and the baseline of every benchmark.

batch -> counts -> ids -> rows -> forward, backward -> row gradients -> row update
                                          \\-> dense gradients -> dense optimizer
"""

from __future__ import annotations

from collections.abc import Iterator

from freescale.batch import SequenceBatch
from freescale.pipeline.agreement import Agreement
from freescale.pipeline.schedule import Schedule, StepResult
from freescale.pipeline.upcoming import Upcoming

_COLLISIONS_EVERY = 10  # steps between two looks at what consecutive batches share


class Serial(Schedule):
    """A step, from its batch to its update."""

    overlaps_dense = False

    def _run(self, batches: Iterator[SequenceBatch]) -> Iterator[StepResult]:
        coming = self._upcoming(self.steps + 1, batches, None, self.transport, self.stopwatch.last)
        while True:
            self.ledger.begin_step(self.steps)
            batch, agreement = coming.complete()
            if not agreement.ready:
                self.ledger.cancel_step()
                return
            coming.count(self.ledger)
            following = self._upcoming(self.steps + 2, batches, coming, self.transport, self.stopwatch.last)
            result = self._step(batch, agreement, following)
            self.ledger.end_step()
            yield result
            coming = following

    def _step(self, batch: SequenceBatch, agreement: Agreement, following: Upcoming) -> StepResult:
        if not self.tables.placed:
            self.tables.place(batch)
        micro = self._micro_batches(batch)
        requests = self.tables.request(micro)
        self._count_collisions(requests)
        self.tables.fetch(requests)
        following.exchanged()
        losses = self._compute(micro, agreement, following.forwarded)
        following.differentiated()
        self.steps += 1
        self.stopwatch.finish(self.steps)
        factor = self._factor(self.steps)
        self.tables.apply(requests, step=self.steps, factor=factor)
        self.buckets.start(self.transport, losses)
        self.buckets.send()
        losses = self.buckets.reduce()
        norm = self._update_dense(factor)
        return self._result(batch, agreement, losses, norm)

    def _count_collisions(self, requests: list) -> None:
        if self.steps and self.steps % _COLLISIONS_EVERY == 0:
            with self.ledger.span("count collisions"):
                asked, colliding = self.tables.collisions(requests)
            self.ledger.count("requests", asked)
            self.ledger.count("collisions", colliding)
