"""What all schedules share: the compute of a step, the dense optimizer, the state. Each schedule
orders them with communication in its own way (serial.py, staged.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from freescale.balance.balancer import Balancer
from freescale.batch import SequenceBatch
from freescale.config import TrainConfig
from freescale.embedding.lease import Capture
from freescale.embedding.sharded_model import ShardedModel
from freescale.ledger.ledger import Ledger
from freescale.pipeline.agreement import MAX_TASKS, Agreement
from freescale.pipeline.choices import Choices
from freescale.pipeline.dense.buckets import GradientBuckets
from freescale.pipeline.dense.local import LocalGradients
from freescale.pipeline.dense.reducer import Reducer
from freescale.pipeline.first_batch import FirstBatchCheck, check_losses
from freescale.pipeline.loss_watch import LossWatch
from freescale.pipeline.next_batch import BatchPreparation
from freescale.pipeline.parts_exchange import PartsExchange
from freescale.pipeline.precision import hold_matmul_precision, make_autocast
from freescale.pipeline.process_memory import freeze_objects
from freescale.pipeline.source import BatchSource
from freescale.pipeline.step_result import StepResult
from freescale.pipeline.stopwatch import Stopwatch
from freescale.transport.api import Transport

DENSE_SUMS = ("auto", "collective", "partitioned")


def check_options(accumulate: int, dense_sums: str) -> None:
    """Raises a ValueError for values that no schedule has."""
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, got {accumulate}")
    if dense_sums not in DENSE_SUMS:
        raise ValueError(f"dense_sums must be one of {', '.join(DENSE_SUMS)}, not {dense_sums!r}")


def check_optimizer(parallel: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer of another model, or of the model before it was parallelized: it would
    train nothing."""
    own = {id(parameter) for parameter in parallel.dense_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = [parameter for parameter in held if id(parameter) not in own]
    if strange:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in strange[:3])
        raise ValueError(
            f"{len(strange)} of the optimizer's {len(held)} parameters are not the model's "
            f"(shapes {shapes}): make it of `sharded.dense_parameters()`; tables have a row "
            "optimizer of their own"
        )


class Taken(Protocol):
    """A batch that is being prepared."""

    @property
    def taken(self) -> SequenceBatch | None:
        """As it came from the data; None until then."""


class Schedule(ABC):
    # gradients of the dense parameters are summed during the backward, not after it
    overlaps_dense: bool

    def __init__(
        self,
        parallel: ShardedModel,
        optimizer: torch.optim.Optimizer,
        *,
        accumulate: int = TrainConfig.accumulate,
        clip: float | None = TrainConfig.clip,
        precision: str = TrainConfig.precision,
        learning_rate: Callable[[int], float] | None = None,
        task_weights: Mapping[str, float] | None = None,
        balancer: Balancer | None = None,
        dense_sums: str = TrainConfig.dense_sums,
        check: bool = True,
    ) -> None:
        """The keywords are those of `Pipeline`, with `balance` resolved to a `balancer`."""
        check_options(accumulate, dense_sums)
        check_optimizer(parallel, optimizer)
        self.parallel, self.optimizer = parallel, optimizer
        self.tables, self.transport = parallel.tables, parallel.transport
        assert isinstance(self.transport.ledger, Ledger)
        self.ledger = self.transport.ledger
        self.accumulate, self.clip = accumulate, clip
        self.task_weights = dict(task_weights or {})
        self.balancer = balancer
        balances = balancer is not None and self.transport.world > 1
        # A frozen cost has an error to report, but learns nothing from each step. Reading the
        # thread clock is a syscall and may yield the core.
        frozen = balancer is None or balancer.adaptive is None
        every = 8 if frozen and self.transport.device.type == "cpu" else 1
        self.stopwatch = Stopwatch(self.ledger.clock, self.transport.device, balances, every)
        self._copies: torch.cuda.Stream | None = None
        if (device := self.transport.device).type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.steps = 0  # made so far
        self._learning_rate = learning_rate
        self._base_lr = [group["lr"] for group in optimizer.param_groups]
        self._stop = self._stopped = self._closed = False
        # of a batch: raised once the steps before it are made
        self._failure: Exception | None = None
        self._taken: list[Taken] = []  # batches on their way, in their order
        self._source: BatchSource | None = None  # of the last run
        self._loss_watch = LossWatch()
        self._first_batch = FirstBatchCheck(parallel.module, self.transport, check)
        dense = list(parallel.dense_parameters())
        alone = self.transport.world == 1
        sums: Callable[..., Reducer] = LocalGradients if alone else GradientBuckets
        self.buckets = sums(dense, self.transport.device)
        self.choices = Choices(self.transport, dense, self.buckets, precision, dense_sums)
        self.parts: PartsExchange | None = None
        if balances and balancer is not None and balancer.divides:
            self.parts = PartsExchange(parallel.module, self.transport)

    def run(self, data: Iterable[SequenceBatch]) -> Iterator[StepResult]:
        """Trains until every rank's data has ended; a rank that runs out joins with empty batches.
        The data of a rank may fail: then all ranks raise, after the steps before it.

        Every rank leaves the loop after the same step, or none; `stop` makes it so. Batches that
        were taken by then are the first of the next run over the same iterator. What is deferred is
        applied before a checkpoint, an evaluation or another pipeline reads the tables; whoever
        reads them otherwise calls `flush` first."""
        if self._closed:
            raise RuntimeError("the pipeline is closed: make another")
        self.choices.tune()
        self._stopped, self._failure, self._loss_watch = False, None, LossWatch()
        source = self._source = self._open_source(iter(data), self.tables.lease.take_over(self))
        self.flush()
        self.tables.lease.drop_ahead()  # of the run before: its batches are the first of this one
        try:
            with freeze_objects(), self.buckets.watch_backward():
                yield from self._run(source)
            self._loss_watch.finish()
        finally:
            self._end_run()
            source.give_back(batch for each in self._taken if (batch := each.taken) is not None)
            self._taken.clear()
            self._stop = False

    def _open_source(self, iterator: Iterator[SequenceBatch], before: object) -> BatchSource:
        """With what the last run left of it."""
        source = before._source if isinstance(before, Schedule) else None
        if source is None or source.iterator is not iterator:
            return BatchSource(iterator)
        source.reopen()
        return source

    @abstractmethod
    def _run(self, source: BatchSource) -> Iterator[StepResult]:
        """The steps, in the schedule's own order."""

    def _end_run(self) -> None:
        """Called however the run ended: nothing takes batches any more."""
        self.choices.rest()
        if self.parts is not None:
            self.parts.rest()

    def stop(self) -> None:
        """As `Pipeline.stop`."""
        self._stop = True

    def check_losses(self) -> None:
        """As `Pipeline.check_losses`."""
        self._loss_watch.finish()

    @property
    def stopped(self) -> bool:
        """Whether `stop`, here or on another rank, ended the last run."""
        return self._stopped

    def close(self) -> None:
        """Applies what is deferred, and gives back threads and channels: the next pipeline of this
        transport uses them again. A collective."""
        if self._closed:
            return
        self.tables.lease.hand_back(self)
        self._closed = True
        self.choices.close()
        if self.parts is not None:
            self.parts.close()

    def _prepare_batch(
        self,
        source: BatchSource,
        before: BatchPreparation | None,
        transport: Transport,
        computed: Callable[[], tuple[int, int]],
        ahead: bool = False,
    ) -> BatchPreparation:
        """Begins to prepare the batch after `before`."""
        step = before.step + 1 if before is not None else self.steps + 1
        preparation = BatchPreparation(
            step,
            source,
            before,
            self.tables,
            transport,
            self.balancer,
            computed,
            lambda: self._stop,
            self._copies,
            ahead,
        )
        self._taken.append(preparation)
        return preparation

    def _check_agreed(self, agreement: Agreement) -> None:
        """What the ranks agreed on, before it is used: the same on all of them."""
        self._stopped |= agreement.stopping
        self._failure = self._failure or agreement.error
        unknown = sorted(set(self.task_weights) - set(agreement.counts))
        if agreement.ready and unknown:
            raise ValueError(
                f"task_weights names {', '.join(unknown)}; the tasks are "
                f"{', '.join(sorted(agreement.counts))}"
            )

    def _split_batch(self, batch: SequenceBatch) -> list[SequenceBatch]:
        if self.accumulate == 1 or len(batch) <= 1:
            return [batch]
        parts = min(self.accumulate, len(batch))
        edges = [len(batch) * part // parts for part in range(parts + 1)]
        if batch.divided is not None:  # all parts of histories are in the first
            least = len(batch.divided.starts)
            edges = [0, *sorted({max(edge, least) for edge in edges[1:]})]
        micro = batch.split([b - a for a, b in zip(edges[:-1], edges[1:], strict=True)])
        if batch.divided is not None:
            micro[0] = replace(micro[0], divided=batch.divided)
        return micro

    def _compute(
        self,
        micro: list[SequenceBatch],
        agreement: Agreement,
        forwarded: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Forward and backward of every micro-batch; `forwarded` is called before the last
        backward. Returns this rank's part of the global losses : those of the tasks, the total
        last."""
        with hold_matmul_precision(self.choices.precision, self.transport.device):
            return self._compute_losses(micro, agreement, forwarded)

    def _compute_losses(
        self, micro: list[SequenceBatch], agreement: Agreement, forwarded: Callable[[], None]
    ) -> Tensor:
        # parts count as samples there
        apart = [replace(batch, divided=None) if batch.divided else batch for batch in micro]
        self._first_batch.run(apart, agreement.samples, self._autocast)
        if self.parts is not None:
            micro = [self.parts.attach(micro[0]), *micro[1:]]
        self.buckets.clear()
        losses: Tensor | None = None
        for batch in micro:
            total: Tensor | None = None
            if len(batch):
                total, means = self._forward(batch, agreement)
                losses = means if losses is None else losses + means
            if batch is micro[-1]:
                forwarded()
                if self.parts is not None:
                    self.parts.end_forward()
                losses = self._pad_losses(losses)
                if self.overlaps_dense:
                    self.buckets.start(self.transport, losses, agreement.longest)
            if total is not None:
                with self.ledger.span("backward"), self.stopwatch.computing():
                    total.backward()  # type: ignore[no-untyped-call]
        if self.parts is not None:
            self.parts.finish()
        if self.overlaps_dense:
            self.buckets.send()
        assert losses is not None
        return losses

    def _pad_losses(self, losses: Tensor | None) -> Tensor:
        """Several ranks reduce a vector for any number of tasks: one without a batch knows none."""
        if self.transport.world == 1 and losses is not None:
            return losses
        device = self.transport.device
        padded = torch.zeros(MAX_TASKS + 1, dtype=torch.float64, device=device)
        if losses is not None:
            padded[: losses.numel() - 1] = losses[:-1]
            padded[-1] = losses[-1]
        return padded

    def _forward(self, batch: SequenceBatch, agreement: Agreement) -> tuple[Tensor, Tensor]:
        """The scalar to differentiate, and the means of the tasks with it last: [tasks + 1] in
        float64."""
        with self.ledger.span("forward"), self.stopwatch.computing(), self._autocast():
            means = self._average_losses(self.parallel.module(batch), agreement)
            weights = (self.task_weights.get(task, 1.0) for task in sorted(agreement.counts))
            parts = [
                mean if weight == 1 else mean * weight
                for mean, weight in zip(means, weights, strict=True)
            ]
            total = torch.stack(parts).sum() if len(parts) > 1 else parts[0]
            return total, torch.stack([*means, total]).detach().double()

    def _average_losses(self, sums: Mapping[str, Tensor], agreement: Agreement) -> list[Tensor]:
        """Sums over samples / global counts, by task in their order."""
        check_losses(sums, sorted(agreement.counts))
        return [
            sums[task] / count if count else sums[task] * 0
            for task, count in sorted(agreement.counts.items())
        ]

    def _autocast(self) -> AbstractContextManager[object]:
        return make_autocast(self.choices.precision, self.transport.device)

    def _get_factor(self, step: int) -> float:
        return 1.0 if self._learning_rate is None else self._learning_rate(step)

    def _update_dense(self, factor: float) -> Tensor | None:
        with self.ledger.span("optimizer"):
            norm: Tensor | None = None
            if self.clip is not None and self.buckets.flat:
                norm = self.buckets.clip(self.clip)
            if self._learning_rate is not None:
                groups = self.optimizer.param_groups
                # added since
                self._base_lr += [group["lr"] for group in groups[len(self._base_lr) :]]
                for group, base in zip(groups, self._base_lr, strict=True):
                    group["lr"] = base * factor
            self.optimizer.step()
        return norm

    def _make_result(
        self, batch: SequenceBatch, agreement: Agreement, losses: Tensor, norm: Tensor | None
    ) -> StepResult:
        """losses: summed over the ranks."""
        self._loss_watch.watch(self.steps, batch.number, losses[-1])
        by_task = dict(zip(sorted(agreement.counts), losses.unbind()))
        return StepResult(self.steps, batch.number, by_task, agreement.counts, losses[-1], norm)

    def flush(self) -> None:  # noqa: B027 - a schedule that defers nothing has nothing to do
        """Applies what the schedule has deferred; afterwards the tables are those of the serial
        schedule. A collective."""

    def discard(self) -> None:  # noqa: B027
        """Forgets what is deferred, and what was fetched ahead: the tables are about to be
        replaced. A collective."""

    def capture(self, capture: Capture) -> None:
        """Copies the rows of sharded tables when they are exactly those of the last step. Here
        they are between steps."""
        capture.make()

    def finish_captures(self) -> None:  # noqa: B027
        """Makes copies for which no step has come. A collective."""

    # ---- state

    def _list_dense_names(self) -> list[str]:
        """Names of the dense parameters, as `buckets` counts them."""
        named = self.parallel.module.named_parameters()
        return [name for name, parameter in named if parameter.requires_grad]

    def _get_order(self) -> list[str] | None:
        """The order in which dense gradients are summed: sums of three numbers depend on it."""
        names, order = self._list_dense_names(), self.buckets.order
        return None if order is None else [names[number] for number in order]

    def state_dict(self) -> dict[str, Any]:
        balancer = self.balancer.state_dict(self.steps) if self.balancer else {}
        return {
            "steps": self.steps,
            "balancer": balancer,
            "order": self._get_order(),
            "choices": self.choices.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        if self.steps:
            self._first_batch.skip()
        self.choices.load_state_dict(state.get("choices", {}))
        if "order" in state:
            numbers = {name: number for number, name in enumerate(self._list_dense_names())}
            kept = state["order"] or ()
            # Of other parameters than are trained now: by the next backward.
            same = bool(kept) and sorted(kept) == sorted(numbers)
            self.buckets.adopt_order([numbers[name] for name in kept] if same else None)
        if self.balancer:
            self.balancer.load_state_dict(state.get("balancer", {}), self.transport.world)
