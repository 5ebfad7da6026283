"""The batch of the next step: taken from the data, agreed on by all ranks and, with balancing,
moved to the ranks that compute it.

Preparation has three stages. The serial schedule, with balancing, runs one of them at each of three
junctures of the step before, so that no rank waits for the exchange that the stage starts; without
balancing nothing happens ahead of time. Stages that have not run when the batch is needed run then:
all of them, for the first batch. The staged schedule runs all stages in a lane.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import InitVar, dataclass, field, replace
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from freescale.balance.balancer import Balancer
from freescale.balance.problem import Assignment
from freescale.balance.shuffle import Shuffle, copy_to_host, count_events, list_homes
from freescale.batch import SequenceBatch
from freescale.batch_codec import build_empty_batch
from freescale.embedding.tables import Tables
from freescale.ledger.ledger import Ledger
from freescale.pipeline.agreement import Agreement, PendingAgreement, Proposal
from freescale.pipeline.source import BatchSource
from freescale.transport.api import Transport


class Juncture(IntEnum):
    """Points of a step at which the serial schedule prepares the next batch; the value is the
    number of stages that have run from there on."""

    FETCHED = 1  # the rows of the step are here
    FORWARDED = 2  # its forward is over
    DIFFERENTIATED = 3  # its backward is over


_TAKEN, _AGREED, _COMPLETE = 1, 2, 3  # stages


def take_batch(
    source: BatchSource, tables: Tables, balancer: Balancer | None, keep: bool = False
) -> SequenceBatch | None:
    """The next batch of a rank's data, on the host and checked; None once the data has ended.
    `keep`: whether the data may change the batch's memory while it is still needed."""
    batch = source.take()
    return None if batch is None else check_batch(batch, tables, balancer, keep)


def check_batch(
    batch: SequenceBatch, tables: Tables, balancer: Balancer | None, keep: bool = False
) -> SequenceBatch:
    """As `take_batch`, of a batch that was taken."""
    batch = copy_to_host(batch)
    if keep:
        batch = batch.map(Tensor.clone)
    tables.check(batch)
    if balancer is not None:
        balancer.check(batch)
    return batch


def count_batch(batch: SequenceBatch, feature: str | None) -> dict[str, float]:
    """Sizes of a batch as it came, for the ledger. Their sums do not change by balancing."""
    counters: dict[str, float] = {"samples": len(batch)}
    events = count_events(batch, feature) if len(batch) else None
    if events is not None:
        counters["tokens"] = int(events.sum())
        counters["max_length"] = int(events.max())
    return counters


def copy_to_device(
    batch: SequenceBatch, device: torch.device, copies: torch.cuda.Stream | None
) -> SequenceBatch:
    """Starts the copy of a batch, on the stream `copies`; on a CPU, the batch itself."""
    if device.type == "cpu":
        return batch
    # Not on the stream that computes: there it would wait for the step before, and the lanes'
    # copies behind it in the engine.
    with torch.cuda.stream(copies):
        # from pageable memory the copy would block the host
        return batch.pin_memory().to(device, non_blocking=True)


@dataclass(eq=False)
class BatchPreparation:
    """Every rank calls the same methods in the same order."""

    step: int  # that will compute the batch
    _source: BatchSource  # of the batches of this rank
    # The batch of the step before. Without data this rank takes part with an empty batch like it.
    before: InitVar[BatchPreparation | None]
    _tables: Tables  # check the ids of the batch
    _transport: Transport  # over which the ranks agree and samples move
    _balancer: Balancer | None  # moves the samples; None leaves them where they are
    # the last step that was measured, the same on every rank, and its nanoseconds of compute
    _computed: Callable[[], tuple[int, int]]
    _stopping: Callable[[], bool]  # whether this rank wants the run to end
    _copies: torch.cuda.Stream | None = None  # on which the batch is copied to a GPU
    _ahead: bool = False  # more batches are taken before this one is computed
    like: SequenceBatch = field(init=False)  # this batch, once it is taken; on the host
    agreement: Agreement | None = field(default=None, init=False)
    taken: SequenceBatch | None = field(default=None, init=False)  # as it came from the data

    def __post_init__(self, before: BatchPreparation | None) -> None:
        self._feature = self._balancer.feature if self._balancer is not None else "history"
        self._balanced = self._balancer is not None and self._transport.world > 1
        self._stages_run = 0
        self._shuffle: Shuffle | None = None
        self._kept: Assignment | None = None  # where balancing would not pay
        self._counters: dict[str, float] = {}
        self._pending: PendingAgreement | None = None
        self.like = before.like if before is not None else SequenceBatch(number=-1)
        agreed = before.agreement if before is not None else None
        self._room = max(agreed.samples) if agreed is not None else 0

    @property
    def begun(self) -> bool:
        """The ranks have begun to agree on the batch."""
        return self._pending is not None

    def advance(self, juncture: Juncture) -> None:
        """Runs the stage of this juncture of the step before. Nothing without balancing."""
        if self._balancer:
            self._run_stages(juncture)

    def take(self) -> None:
        """Takes the batch from the data and starts the agreement on it: little work, and then the
        other ranks' turn."""
        self._run_stages(_TAKEN)

    def agree(self) -> Agreement:
        """Waits until the ranks have agreed on the batch."""
        self._run_stages(_AGREED)
        assert self.agreement is not None
        return self.agreement

    def meet(self, left: int | None = None) -> None:
        """The ranks tell each other that they are still there. A rank that has left the loop says
        after which step (`left`), here or where the others agree on the batch."""
        computed = self._computed()
        proposal = Proposal(None, None, self.like, self._space, computed=computed, left=left)
        PendingAgreement(proposal, self._transport).wait()

    def complete(self) -> tuple[SequenceBatch, Agreement]:
        """The batch, on the rank and device that compute it, and the agreement on it. If not
        `agreement.ready`, there is no such batch: the data has ended on all ranks."""
        self._run_stages(_COMPLETE)
        assert self.agreement is not None
        if not self.agreement.ready:
            return self.like, self.agreement
        batch, assignment = self.like, self._kept
        if self._shuffle is not None:
            with self._balance_span():
                batch = self._shuffle.finish()
            assignment = self._shuffle.assignment
        if assignment is not None:
            self._count_balanced(batch, assignment)
        return self._move_to_device(batch), self.agreement

    def count(self, ledger: Ledger) -> None:
        """Adds the figures of the batch to the ledger of the step that computes it."""
        for name, value in self._counters.items():
            ledger.count(name, value)

    # ---- stages

    def _run_stages(self, up_to: int) -> None:
        stages = (self._take, self._agree, self._send_samples)
        while self._stages_run < up_to:
            self._stages_run += 1
            stages[self._stages_run - 1]()

    def _take(self) -> None:
        """Takes the batch from the data and starts the agreement on it."""
        batch: SequenceBatch | None = None
        error: Exception | None = None
        stopping = self._stopping()
        with self._transport.ledger.span("data"):
            try:
                if not stopping:
                    # to a GPU they are copied anyway
                    on_host = self._transport.device.type == "cpu"
                    keep = self._ahead and on_host and not self._source.is_lasting
                    batch = take_batch(self._source, self._tables, self._balancer, keep)
                if batch is not None:
                    self.taken = batch
                    self._counters = count_batch(batch, self._feature)
            except Exception as caught:  # noqa: BLE001 - raised on all ranks, with the answer
                batch, error, self.taken = None, caught, None
        with self._transport.ledger.span("agree"):
            proposal = Proposal(
                batch, error, self.like, self._space, self._feature, self._computed(), stopping
            )
            self._pending = PendingAgreement(proposal, self._transport)

    @property
    def _space(self) -> int | None:
        return self._room if self._balanced else None

    def _agree(self) -> None:
        """Waits for the agreement; with balancing, plans and starts the exchange of sizes."""
        assert self._pending is not None
        with self._transport.ledger.span("agree"):
            self.agreement = self._pending.wait()
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
            with self._balance_span():
                self._balance(batch, self.agreement)

    def _balance(self, batch: SequenceBatch, agreement: Agreement) -> None:
        """Plans and, if moving samples pays, starts the exchange of sizes."""
        balancer, transport, counts = self._balancer, self._transport, agreement.samples
        assert balancer is not None
        balancer.learn(agreement.computed_step, agreement.computed)
        self._kept = balancer.keep(agreement.lengths, list_homes(counts), transport.world)
        if self._kept is None:
            self._shuffle = Shuffle(self.step, batch, counts, balancer, transport)
            self._shuffle.send_sizes(agreement.lengths)

    def _send_samples(self) -> None:
        """With balancing, starts the exchange of samples."""
        if self._shuffle is not None:
            with self._balance_span():
                self._shuffle.send_samples()

    def _move_to_device(self, batch: SequenceBatch) -> SequenceBatch:
        device = self._transport.device
        moved = copy_to_device(batch, device, self._copies)
        if moved is batch:
            return batch
        compute = torch.cuda.current_stream(device)
        if self._copies is not None:
            compute.wait_stream(self._copies)
        for tensor in moved.tensors():
            tensor.record_stream(compute)
        return moved

    def _count_balanced(self, batch: SequenceBatch, assignment: Assignment) -> None:
        """What balancing did, and what this rank had before it and has now."""
        self._counters["max_predicted_imbalance"] = assignment.imbalance
        self._counters["max_moved_tokens"] = assignment.moved_tokens
        rank = self._transport.rank
        self._counters["before_cost"] = float(assignment.loads_before[rank])
        self._counters["after_cost"] = float(assignment.loads[rank])
        self._counters["after_samples"] = len(batch)
        if assignment.division is not None and batch.divided is not None:
            divided = assignment.division.sample[assignment.division.is_part]
            self._counters["max_split_samples"] = len(np.unique(divided))
            self._counters["split_parts"] = len(batch.divided.starts)
        events = count_events(batch, self._feature)
        if events is not None:
            self._counters["after_tokens"] = int(events.sum())
            self._counters["after_longest"] = int(events.max(initial=0))
        assert self._balancer is not None
        if (error := self._balancer.error) is not None:
            self._counters["max_cost_error"] = error

    def _balance_span(self) -> AbstractContextManager[None]:
        """Around all that balancing keeps this rank from computing: planning, packing and
        rebuilding as well as waits."""
        return self._transport.ledger.span("balance")
