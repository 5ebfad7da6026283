"""What every schedule does alike: the compute of a step, the dense optimizer, the state. How these are ordered with communication
is the schedule's own business (serial.py, staged.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from freescale.balance.balancer import Balancer
from freescale.batch import SequenceBatch
from freescale.config import TrainConfig
from freescale.embedding.swap import Parallel
from freescale.observe.ledger import Ledger
from freescale.pipeline.agreement import MAX_TASKS, Agreement
from freescale.pipeline.buckets import GradientBuckets
from freescale.pipeline.garbage import objects_set_aside
from freescale.pipeline.reducer import MakeReducer, Reducer
from freescale.pipeline.stopwatch import Stopwatch
from freescale.pipeline.summing import Summing
from freescale.pipeline.upcoming import Upcoming
from freescale.transport.api import Transport

DENSE_SUMS = ("collective", "parts")


@dataclass(frozen=True)
class StepResult:
    """What a step did. Losses stay tensors until someone reads them: reading waits for the device."""

    number: int  # of the global batch
    step: int  # optimizer steps made so far, this one included
    losses: Mapping[str, Tensor]  # global mean per task (empty on a rank that never had a batch: it knows no task)
    counts: Mapping[str, float]  # global weight per task
    total: Tensor  # what was differentiated: the weighted sum of the losses, over all ranks
    gradient_norm: Tensor | None

    @property
    def loss(self) -> float:
        return float(self.total)


class Schedule(ABC):
    overlaps_dense: bool  # gradients of the dense parameters are summed during the backward, not after it

    def __init__(
        self,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        *,
        accumulate: int = TrainConfig.accumulate,
        clip: float | None = TrainConfig.clip,
        precision: str = TrainConfig.precision,
        learning_rate: Callable[[int], float] | None = None,
        task_weights: Mapping[str, float] | None = None,
        balancer: Balancer | None = None,
        reducer: MakeReducer | None = None,
        dense_sums: str = TrainConfig.dense_sums,
    ) -> None:
        """`learning_rate(step)` scales the learning rates of the dense optimizer and of the rows; steps count from 1.

        `accumulate` cuts a rank's batch into that many micro-batches; the step stays one step. `precision` is fp32 (whatever the
        model's parameters are) or bf16 (autocast; no loss scaling). `balancer` moves the samples of the next batch while this one
        computes. `reducer` sums the dense gradients over the ranks in another way than exactly (`freescale.Thresholding(0.99)`).
        `dense_sums`: by the process group (collective), or by parts over the transport's own exchanges (parts: summing.py).
        """
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {accumulate}")
        if precision not in ("fp32", "bf16"):
            raise ValueError(f"precision must be fp32 or bf16, not {precision!r}")
        if dense_sums not in DENSE_SUMS:
            raise ValueError(f"dense_sums must be one of {', '.join(DENSE_SUMS)}, not {dense_sums!r}")
        if dense_sums == "parts" and reducer is not None:
            raise ValueError("compressed gradients are summed in their own way: dense_sums='parts' is for exact ones")
        self.parallel, self.optimizer = parallel, optimizer
        self.tables, self.transport = parallel.tables, parallel.transport
        assert isinstance(self.transport.ledger, Ledger)
        self.ledger = self.transport.ledger
        self.accumulate, self.clip, self.precision = accumulate, clip, precision
        self.task_weights = dict(task_weights or {})
        self.balancer = balancer
        self.stopwatch = Stopwatch(self.ledger.clock, self.transport.device)
        self._copies = torch.cuda.Stream(self.transport.device) if self.transport.device.type == "cuda" else None
        self.steps = 0  # made so far
        self._factor = learning_rate or (lambda step: 1.0)
        self._base_lr = [group["lr"] for group in optimizer.param_groups]
        parts = dense_sums == "parts" and self.transport.world > 1
        self._summing = Summing(self.transport) if parts else None
        exact = partial(GradientBuckets, summing=self._summing)
        self.buckets: Reducer = (reducer or exact)(parallel.dense_parameters(), self.transport.device)

    def run(self, data: Iterable[SequenceBatch]) -> Iterator[StepResult]:
        """Trains until every rank's data has ended; a rank that runs out joins with empty batches. The data of a rank may fail:
        then all ranks raise. Who leaves the loop early calls `flush` before reading the tables (checkpoints and evaluation do)."""
        with objects_set_aside():
            yield from self._run(iter(data))
        if self._summing is not None:
            self._summing.close()

    @abstractmethod
    def _run(self, batches: Iterator[SequenceBatch]) -> Iterator[StepResult]:
        """The steps, in the schedule's own order."""

    def _upcoming(
        self,
        step: int,
        batches: Iterator[SequenceBatch],
        before: Upcoming | None,
        transport: Transport,
        computed: Callable[[], tuple[int, int]],
    ) -> Upcoming:
        return Upcoming(step, batches, before, self.tables, transport, self.balancer, computed, self._copies)

    def _micro_batches(self, batch: SequenceBatch) -> list[SequenceBatch]:
        if self.accumulate == 1 or len(batch) <= 1:
            return [batch]
        parts = min(self.accumulate, len(batch))
        edges = [len(batch) * part // parts for part in range(parts + 1)]
        return batch.split([b - a for a, b in zip(edges[:-1], edges[1:], strict=True)])

    def _compute(self, micro: list[SequenceBatch], agreement: Agreement, forwarded: Callable[[], None] = lambda: None) -> Tensor:
        """Forward and backward of every micro-batch; `forwarded` is called before the last backward. Returns this rank's part of
        the global losses [tasks + total]."""
        device = self.transport.device
        self.buckets.clear()
        # Sized for any number of tasks, so that a rank without a batch (which knows none) reduces the same vector; the total last.
        losses = torch.zeros(MAX_TASKS + 1, dtype=torch.float64, device=device)
        for batch in micro:
            total = self._forward(batch, agreement, losses) if len(batch) else None
            if batch is micro[-1]:
                forwarded()
                if self.overlaps_dense:
                    self.buckets.start(self.transport, losses)
            if total is not None:
                with self.ledger.span("backward"), self.stopwatch.computing():
                    total.backward()
        if self.overlaps_dense:
            self.buckets.send()
        return losses

    def _forward(self, batch: SequenceBatch, agreement: Agreement, losses: Tensor) -> Tensor:
        with self.ledger.span("forward"), self.stopwatch.computing(), self._autocast():
            total = self._total(self.parallel.module(batch), agreement, losses)
            losses[-1] += total.detach().double()
        return total

    def _total(self, sums: Mapping[str, Tensor], agreement: Agreement, losses: Tensor) -> Tensor:
        """The scalar to differentiate: sums over samples / global counts. Adds the task's means to `losses`."""
        if set(sums) != set(agreement.counts):
            raise ValueError(f"the model returned tasks {sorted(sums)}, the batch has weights for {sorted(agreement.counts)}")
        parts: list[Tensor] = []
        for position, (task, count) in enumerate(sorted(agreement.counts.items())):
            mean = sums[task] / count if count else sums[task] * 0
            losses[position] += mean.detach().double()
            parts.append(mean * self.task_weights.get(task, 1.0))
        return torch.stack(parts).sum()

    def _autocast(self):
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.transport.device.type, dtype=torch.bfloat16)

    def _update_dense(self, factor: float) -> Tensor | None:
        with self.ledger.span("optimizer"):
            norm = self.buckets.clip(self.clip) if self.clip is not None and self.buckets.flat else None
            for group, base in zip(self.optimizer.param_groups, self._base_lr, strict=True):
                group["lr"] = base * factor
            self.optimizer.step()
        return norm

    def _result(self, batch: SequenceBatch, agreement: Agreement, losses: Tensor, norm: Tensor | None) -> StepResult:
        """losses: summed over the ranks."""
        by_task = dict(zip(sorted(agreement.counts), losses.unbind()))
        return StepResult(batch.number, self.steps, by_task, agreement.counts, losses[-1], norm)

    def flush(self) -> None:  # noqa: B027 - a schedule that defers nothing has nothing to do
        """Applies what the schedule has deferred; afterwards the tables are those of the serial schedule. A collective."""

    # ---- state

    def state_dict(self) -> dict:
        return {"steps": self.steps, "balancer": self.balancer.state_dict(self.steps) if self.balancer else {}}

    def load_state_dict(self, state: Mapping) -> None:
        self.steps = int(state["steps"])
        if self.balancer:
            self.balancer.load_state_dict(state.get("balancer", {}), self.transport.world)
