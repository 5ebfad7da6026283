"""The batch of the next step: taken from the data, agreed on by all ranks and, with balancing,
moved to where it is computed.

In the serial schedule, balanced, its stages are started at three junctures of the step before it,
so that nobody waits for them; what has not been started when the batch is needed is done then (the
first batch: everything). Unbalanced, nothing happens ahead of time. The staged schedule completes
it in a lane.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from freescale.balance.balancer import Balancer
from freescale.balance.problem import Assignment
from freescale.balance.shuffle import Shuffle, host
from freescale.batch import SequenceBatch
from freescale.batch_codec import build_empty_batch
from freescale.embedding.tables import Tables
from freescale.ledger.ledger import Ledger
from freescale.pipeline.agreement import Agreement, Asked, Question
from freescale.pipeline.source import Source
from freescale.transport.api import Transport


class BatchPreparation:
    """Every rank calls the same methods in the same order."""

    def __init__(
        self,
        step: int,
        source: Source,
        before: BatchPreparation | None,
        tables: Tables,
        transport: Transport,
        balancer: Balancer | None,
        computed: Callable[[], tuple[int, int]],
        stopping: Callable[[], bool],
        copies: torch.cuda.Stream | None = None,
        ahead: bool = False,
    ) -> None:
        """`step` will compute it. `before`: the batch of the step before; without data this rank
        takes part with an empty one of the same features. `computed`: the last step that was
        measured, the same on every rank, and its nanoseconds. `stopping`: whether this rank wants
        the run to end. `copies`: the stream on which it goes to a GPU. `ahead`: more batches are
        taken before this one is computed."""
        self.step, self._source, self._tables, self._transport = step, source, tables, transport
        self._balancer, self._computed, self._copies = balancer, computed, copies
        self._stopping, self._ahead = stopping, ahead
        self._stages: list[Callable[[], None]] = [self._ask, self._sizes, self._samples]
        self._shuffle: Shuffle | None = None
        self._counters: dict[str, float] = {}
        self._room = (
            max(before.agreement.samples)
            if before is not None and before.agreement is not None
            else 0
        )
        self.like: SequenceBatch = (
            before.like if before is not None else SequenceBatch(number=-1)
        )  # this batch, once it is taken; on the host
        self.agreement: Agreement | None = None
        self._balanced = balancer is not None and transport.world > 1
        self._asked: Asked | None = None
        self.taken: SequenceBatch | None = None  # as it came from the data

    # ---- the junctures of the step before

    def exchanged(self) -> None:
        """Its embedding exchange is over."""
        if self._balancer:
            self._advance(1)

    def forwarded(self) -> None:
        if self._balancer:
            self._advance(1)

    def differentiated(self) -> None:
        if self._balancer:
            self._advance(1)

    # ---- its own step

    @property
    def asked(self) -> bool:
        """The ranks have begun to agree on it."""
        return self._asked is not None

    def agree(self) -> Agreement:
        """Stage I, to its end."""
        self._advance(len(self._stages) - 1)
        assert self.agreement is not None
        return self.agreement

    def meet(self, left: int | None = None) -> None:
        """The ranks tell each other that they are still there; one that is not says after which
        step it has left the loop, here or where the others ask for the batch."""
        Asked(
            Question(None, None, self.like, self._space, self._computed(), left=left),
            self._transport,
        ).answer()

    def complete(self) -> tuple[SequenceBatch, Agreement]:
        """The batch, where it is to be computed. Nothing is in it if the data has ended everywhere
        (`agreement.ready`)."""
        self._advance(len(self._stages))
        assert self.agreement is not None
        if not self.agreement.ready:
            return self.like, self.agreement
        if self._shuffle is not None:
            assert self._balancer is not None and self._shuffle.assignment is not None
            with self._balancing():
                batch = self._shuffle.finish()
            self._count_balanced(batch, self._shuffle.assignment)
            if self._balancer.error is not None:
                self._counters["max_cost_error"] = self._balancer.error
        else:
            batch = self.like
        return self._moved(batch), self.agreement

    def count(self, ledger: Ledger) -> None:
        """Its figures, into the ledger of the step that computes it."""
        for name, value in self._counters.items():
            ledger.count(name, value)

    # ---- stages

    def _advance(self, stages: int) -> None:
        for _ in range(min(stages, len(self._stages))):
            self._stages.pop(0)()

    def _ask(self) -> None:
        """Takes the batch from the data; stage I starts."""
        batch: SequenceBatch | None = None
        error: Exception | None = None
        stopping = self._stopping()
        with self._transport.ledger.span("data"):
            try:
                batch = None if stopping else self._source.take()
                if batch is not None:
                    self.taken = batch = host(batch)
                    if self._ahead and self._transport.device.type == "cpu":
                        # An iterator may fill the same buffers again; to a GPU they are copied
                        # anyway.
                        self.taken = batch = batch.map(Tensor.clone)
                    self._tables.check(batch)
                    self._count(batch)
            except Exception as caught:  # noqa: BLE001 - raised on all ranks, with the answer
                batch, error, self.taken = None, caught, None
        with self._transport.ledger.span("agree"):
            question = Question(batch, error, self.like, self._space, self._computed(), stopping)
            self._asked = Asked(question, self._transport)

    @property
    def _space(self) -> int | None:
        return self._room if self._balanced else None

    def _sizes(self) -> None:
        """Stage I ends; with balancing, stage II starts."""
        assert self._asked is not None
        with self._transport.ledger.span("agree"):
            self.agreement = self._asked.answer()
        if not self.agreement.ready:
            self._source.close()
            return
        batch = self.taken
        if batch is None:
            empty = (
                build_empty_batch(self.agreement.schema)
                if self.agreement.schema
                else self.like.slice(0, 0)
            )
            batch = replace(empty, number=self.agreement.number)
        self.like = batch
        if self._balanced:
            assert self._balancer is not None
            self._shuffle = Shuffle(
                self.step, batch, self.agreement.samples, self._balancer, self._transport
            )
            with self._balancing():
                self._balancer.learn(self.agreement.computed_step, self.agreement.computed)
                self._shuffle.sizes(self.agreement.lengths)

    def _moved(self, batch: SequenceBatch) -> SequenceBatch:
        device = self._transport.device
        if device.type == "cpu":
            return batch
        compute = torch.cuda.current_stream(device)
        # Not on the stream that computes: there it would wait for the step before, and the lanes'
        # copies behind it in the engine.
        with torch.cuda.stream(self._copies):
            # from pageable memory the copy would block the host
            moved = batch.pin_memory().to(device, non_blocking=True)
        if self._copies is not None:
            compute.wait_stream(self._copies)
        for tensor in moved.tensors():
            tensor.record_stream(compute)
        return moved

    def _count(self, batch: SequenceBatch) -> None:
        """Sizes of the batch as it came. Their sums do not change by balancing."""
        self._counters["samples"] = len(batch)
        if "history" in batch.sequences and len(batch):
            history = batch.sequences["history"]
            self._counters["tokens"] = history.values.shape[0]
            self._counters["max_length"] = int(history.lengths.max())

    def _count_balanced(self, batch: SequenceBatch, assignment: Assignment) -> None:
        """What balancing did, and what this rank had before it and has now."""
        self._counters["max_predicted_imbalance"] = assignment.imbalance
        self._counters["max_moved_tokens"] = assignment.moved_tokens
        rank = self._transport.rank
        self._counters["before_cost"] = float(assignment.loads_before[rank])
        self._counters["after_cost"] = float(assignment.loads[rank])
        self._counters["after_samples"] = len(batch)
        if "history" in batch.sequences:
            history = batch.sequences["history"]
            self._counters["after_tokens"] = history.values.shape[0]
            self._counters["after_longest"] = int(history.lengths.max()) if len(batch) else 0

    def _balancing(self) -> AbstractContextManager[None]:
        """All that balancing keeps this rank from computing: planning, packing and rebuilding as
        well as waits."""
        return self._transport.ledger.span("balance")

    def _samples(self) -> None:
        if self._shuffle is not None:
            with self._balancing():
                self._shuffle.samples()
