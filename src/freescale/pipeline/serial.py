"""The serial schedule: nothing overlaps. The oracle of every test and the baseline of every
benchmark.

batch -> counts -> ids -> rows -> forward, backward -> row gradients -> row update
                                          \\-> dense gradients -> dense optimizer
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

from freescale.batch import SequenceBatch
from freescale.pipeline.agreement import Agreement
from freescale.pipeline.next_batch import BatchPreparation
from freescale.pipeline.schedule import Schedule, StepResult
from freescale.pipeline.source import Source
from freescale.transport.api import TransportError

_COLLISIONS_EVERY = 10  # steps between two looks at what consecutive batches share


class Serial(Schedule):
    """A step, from its batch to its update."""

    overlaps_dense = False

    def _run(self, source: Source) -> Iterator[StepResult]:
        coming = self._next(source, None)
        while True:
            self.ledger.begin_step(self.steps)
            batch, agreement = coming.complete()
            self._check_agreed(agreement)
            if not agreement.ready:
                self.ledger.cancel_step()
                if self._failure is not None:
                    raise self._failure
                return
            coming.count(self.ledger)
            self._taken.remove(coming)
            following = self._next(source, coming)
            result = self._step(batch, agreement, following)
            self.ledger.end_step()
            try:
                yield result
            except GeneratorExit:
                self._tell_left(following)
                raise
            if following.asked:  # balanced: they agreed on it before this step was over
                following.meet()
            coming = following

    def _tell_left(self, following: BatchPreparation) -> None:
        """The others would wait for this rank."""
        if self.transport.world > 1 and not sys.is_finalizing():
            with suppress(TransportError):  # nobody is there to hear it
                following.meet(left=self.steps)

    def _next(self, source: Source, before: BatchPreparation | None) -> BatchPreparation:
        return self._upcoming(source, before, self.transport, self.stopwatch.last)

    def _step(
        self, batch: SequenceBatch, agreement: Agreement, following: BatchPreparation
    ) -> StepResult:
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
                asked, colliding = self.tables.count_collisions(requests)
            self.ledger.count("requests", asked)
            self.ledger.count("collisions", colliding)
