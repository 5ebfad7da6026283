"""The batch of the next step: taken from the data, agreed on by all ranks and, with balancing, moved to where it is computed.

Balanced, its stages are started at three junctures of the step before it, so that nobody waits for them; what has not been started
when the batch is needed is done then (the first batch: everything). Unbalanced, nothing happens ahead of time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

from freescale.balance.shuffle import Balancer, Shuffle
from freescale.batch import SequenceBatch
from freescale.embedding.collection import Tables
from freescale.pipeline.agreement import Agreement, agree
from freescale.transport.api import Transport


class Upcoming:
    """Every rank calls the same methods in the same order."""

    def __init__(
        self,
        batches: Iterator[SequenceBatch],
        like: SequenceBatch,
        tables: Tables,
        transport: Transport,
        balancer: Balancer | None,
    ) -> None:
        """`like`: the last batch that this rank had; without data it takes part with an empty one of the same features."""
        self._batches, self._tables, self._transport, self._balancer = batches, tables, transport, balancer
        self._stages = [self._take, self._lengths, self._sizes, self._samples]
        self._shuffle: Shuffle | None = None
        self._counters: dict[str, float] = {}
        self.like = like
        self.agreement: Agreement | None = None

    # ---- the junctures of the step before

    def exchanged(self) -> None:
        """Its embedding exchange is over."""
        if self._balancer:
            self._advance(2)

    def forwarded(self) -> None:
        if self._balancer:
            self._advance(1)

    def differentiated(self) -> None:
        if self._balancer:
            self._advance(1)

    # ---- its own step

    def complete(self) -> tuple[SequenceBatch, Agreement]:
        """The batch, where it is to be computed. Nothing is in it if the data has ended everywhere (`agreement.ready`)."""
        self._advance(len(self._stages))
        assert self.agreement is not None
        batch = self.like
        if self._shuffle is not None:
            with self._balancing():
                batch = replace(self._shuffle.finish(), number=batch.number)
            assert self._shuffle.assignment is not None
            self._counters["max_predicted_imbalance"] = self._shuffle.assignment.imbalance
            self._counters["max_moved_tokens"] = self._shuffle.assignment.moved_tokens
        for name, value in self._counters.items():
            self._transport.ledger.count(name, value)
        return batch, self.agreement

    # ---- stages

    def _advance(self, stages: int) -> None:
        for _ in range(min(stages, len(self._stages))):
            self._stages.pop(0)()

    def _take(self) -> None:
        batch: SequenceBatch | None = None
        error: Exception | None = None
        with self._transport.ledger.span("data"):
            try:
                batch = next(self._batches, None)
                if batch is not None:
                    self._tables.check(batch)
                    self._count(batch)
                    batch = self._moved(batch)
            except Exception as caught:  # noqa: BLE001 - raised on all ranks, by agree()
                batch, error = None, caught
        self.agreement = agree(batch, error, self._transport, self.like)
        self.like = batch if batch is not None else replace(self.like.slice(0, 0), number=self.like.number + 1)
        if self._balancer and self.agreement.ready and self._transport.world > 1:
            self._shuffle = Shuffle(self.like, self.agreement.samples, self._balancer, self._transport)

    def _moved(self, batch: SequenceBatch) -> SequenceBatch:
        device = self._transport.device
        if device.type == "cuda" and batch.device.type == "cpu":
            batch = batch.pin_memory()  # from pageable memory the copy would block the host
        return batch.to(device, non_blocking=True)

    def _count(self, batch: SequenceBatch) -> None:
        """Sizes of the batch as it came, while it is on the host: nothing is waited for. Their sums do not change by balancing."""
        self._counters["samples"] = len(batch)
        if "history" in batch.sequences and len(batch):
            history = batch.sequences["history"]
            self._counters["tokens"] = history.values.shape[0]
            if history.lengths.device.type == "cpu":
                self._counters["max_length"] = int(history.lengths.max())

    def _balancing(self) -> AbstractContextManager[None]:
        """All that balancing keeps this rank from computing: planning, packing and rebuilding as well as waits."""
        return self._transport.ledger.span("balance")

    def _lengths(self) -> None:
        if self._shuffle is not None:
            with self._balancing():
                self._shuffle.lengths()

    def _sizes(self) -> None:
        if self._shuffle is not None:
            with self._balancing():
                self._shuffle.sizes()

    def _samples(self) -> None:
        if self._shuffle is not None:
            with self._balancing():
                self._shuffle.samples()
