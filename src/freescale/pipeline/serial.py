"""The serial schedule: nothing overlaps. The oracle of every test and the baseline of every
benchmark.

batch -> counts -> ids -> rows -> forward, backward -> row gradients -> row update
                                          \\-> dense gradients -> dense optimizer
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from freescale.batch import SequenceBatch
from freescale.pipeline.agreement import Agreement
from freescale.pipeline.next_batch import BatchPreparation, Juncture
from freescale.pipeline.schedule import Schedule
from freescale.pipeline.source import BatchSource
from freescale.pipeline.step_result import StepResult
from freescale.transport.api import TransportError

_COLLISIONS_EVERY = 10  # steps between two looks at what consecutive batches share


class Serial(Schedule):
    """A step, from its batch to its update."""

    overlaps_dense = False

    def _run(self, source: BatchSource) -> Iterator[StepResult]:
        current = self._next(source, None)
        while True:
            self.ledger.begin_step(self.steps)
            batch, agreement = current.complete()
            self._check_agreed(agreement)
            if not agreement.ready:
                self.ledger.cancel_step()
                if self._failure is not None:
                    raise self._failure
                return
            current.count(self.ledger)
            self._taken.remove(current)
            following = self._next(source, current)
            result = self._step(batch, agreement, following)
            self.ledger.end_step()
            try:
                yield result
            except GeneratorExit:
                self._announce_leaving(following)
                raise
            if following.begun:  # balanced: the ranks agreed on it before this step was over
                following.meet()
            current = following

    def _announce_leaving(self, following: BatchPreparation) -> None:
        """Tells the other ranks, which would wait for this one."""
        if self.transport.world > 1 and not sys.is_finalizing():
            with suppress(TransportError):  # the others may have ended already
                following.meet(left=self.steps)

    def _next(self, source: BatchSource, before: BatchPreparation | None) -> BatchPreparation:
        return self._prepare_batch(source, before, self.transport, self.stopwatch.last)

    def _step(
        self, batch: SequenceBatch, agreement: Agreement, following: BatchPreparation
    ) -> StepResult:
        if not self.tables.placed:
            self.tables.place(batch)
        micro = self._split_batch(batch)
        requests = self.tables.set.request(micro)
        self._count_collisions(requests)
        rows = self.tables.set.fetch(requests)
        self.tables.open(rows)
        following.advance(Juncture.FETCHED)
        losses = self._compute(micro, agreement, lambda: following.advance(Juncture.FORWARDED))
        following.advance(Juncture.DIFFERENTIATED)
        self.steps += 1
        self.stopwatch.finish(self.steps)
        factor = self._get_factor(self.steps)
        self.tables.close()
        self.tables.set.apply(rows, step=self.steps, factor=factor, clip=self.tables.row_clip)
        self.buckets.start(self.transport, losses, agreement.longest)
        self.buckets.send()
        losses = self.buckets.reduce()
        norm = self._update_dense(factor)
        return self._make_result(batch, agreement, losses, norm)

    def _count_collisions(self, requests: list[Any]) -> None:
        if self.steps and self.steps % _COLLISIONS_EVERY == 0:
            with self.ledger.span("count collisions"):
                requested, colliding = self.tables.set.count_collisions(requests)
            self.ledger.count("requests", requested)
            self.ledger.count("collisions", colliding)
