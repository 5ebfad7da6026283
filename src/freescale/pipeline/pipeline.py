"""`Pipeline`: trains a sharded model, step by step, in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import torch

from freescale.balance.balancer import Balancer, make_balancer
from freescale.balance.problem import Partitioner
from freescale.batch import SequenceBatch
from freescale.config import TrainConfig
from freescale.embedding.sharded_model import ShardedModel
from freescale.ledger.ledger import Ledger
from freescale.pipeline.schedule import Schedule
from freescale.pipeline.serial import Serial
from freescale.pipeline.single import SerialSingle, Single, pads_products
from freescale.pipeline.staged import Staged
from freescale.pipeline.step_result import StepResult

SCHEDULES: dict[str, type[Schedule]] = {"staged": Staged, "serial": Serial}


class Pipeline:
    """Trains a model that `parallelize` returned. Every rank makes one, with the same arguments.

    Args:
        model: what `freescale.parallelize` returned.
        optimizer: a torch optimizer of `model.dense_parameters()`. The tables' rows have row
            optimizers of their own, see `parallelize`.
        schedule: "staged" (communication of the next batch overlaps the compute of this one) or
            "serial" (nothing overlaps). Both train the same numbers. On one rank, where nothing
            travels, "staged" is a schedule without exchanges (single.py). A class derived from
            `Schedule`, or another callable that makes one, is taken too.
        balance: how the samples of each global batch are distributed over the ranks. None or
            "none" leaves them where they are; otherwise the name of a partitioner ("greedy"), a
            function `Problem -> ranks` or a `Balancer` with a cost model of its own. A name or a
            function alone counts an event of the feature `history` as one unit of cost.
        accumulate: number of micro-batches that a rank's batch is cut into; it stays one step.
        clip: largest norm of the dense gradients over all parameters; None does not clip.
        precision: "fp32" (compute in the dtype of the parameters; TF32 is off while a step
            computes), "tf32" (the same with matrix products of float32 in TF32, on GPUs), "bf16"
            (autocast) or "auto": bf16 on GPUs that have it, for float32 parameters; else fp32.
        learning_rate: a function `step -> factor`, steps counted from 1, that scales the learning
            rates of the dense optimizer and of the rows. None leaves them alone, for torch's
            schedulers.
        task_weights: weight of each task's loss in the total; 1 for tasks that are not named.
        dense_sums: "collective" (the process group's all-reduce), "partitioned" (each rank sums a
            partition, over the transport's own exchanges) or "auto": both are timed before step 1
            where they take different paths. Sums of three and more ranks may differ in their last
            bits between the two; `state_dict` has the choice, and a resumed run repeats it.
        check: on the first batch, verify that the model returns sums and that samples do not
            depend on each other (see docs/start/your_model.md). Training itself is unchanged by it.

    Raises:
        TypeError: `model` or `optimizer` is something else than what is described above.
        ValueError: an option has no such value, or the optimizer holds other parameters.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: str | Callable[..., Schedule] = TrainConfig.schedule,
        balance: str | Partitioner | Balancer | None = None,
        accumulate: int = TrainConfig.accumulate,
        clip: float | None = TrainConfig.clip,
        precision: str = TrainConfig.precision,
        learning_rate: Callable[[int], float] | None = None,
        task_weights: Mapping[str, float] | None = None,
        dense_sums: str = TrainConfig.dense_sums,
        check: bool = True,
    ) -> None:
        if not isinstance(model, ShardedModel):
            raise TypeError(
                f"Pipeline trains what parallelize returns, not a {type(model).__name__}: "
                "sharded = freescale.parallelize(model, ids={...}), then Pipeline(sharded, ...)"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}: give a torch optimizer of "
                "sharded.dense_parameters(); row optimizers belong to parallelize"
            )
        if learning_rate is not None and not callable(learning_rate):
            raise TypeError(
                f"learning_rate={learning_rate!r} is not a function: the optimizers have the "
                "rates, learning_rate=lambda step: factor scales them"
            )
        if isinstance(schedule, str):
            if schedule not in SCHEDULES:
                raise ValueError(f"unknown schedule {schedule!r}; there is {', '.join(SCHEDULES)}")
            schedule = _choose_schedule(schedule, model, accumulate)
        self.schedule: Schedule = schedule(
            model,
            optimizer,
            accumulate=accumulate,
            clip=clip,
            precision=precision,
            learning_rate=learning_rate,
            task_weights=task_weights,
            balancer=make_balancer(balance, model.transport.device),
            dense_sums=dense_sums,
            check=check,
        )

    def run(self, batches: Iterable[SequenceBatch]) -> Iterator[StepResult]:
        """Trains until the batches of every rank have ended; a rank that runs out first takes part
        with empty ones.

        Every rank leaves the loop after the same step; `stop` ends it on all ranks. Batches that
        were taken ahead and not trained are the first of the next run over the same iterator.

        Args:
            batches: this rank's batches, on the host.

        Yields:
            The result of each step.

        Raises:
            LossNotFinite: the loss is infinite or not a number, on all ranks.
            RemoteError: another rank failed or left the loop alone.
        """
        return self.schedule.run(batches)

    def check_losses(self) -> None:
        """Waits for the losses of all steps so far: on a GPU the run itself reads them some steps
        later. LossNotFinite, on all ranks, if one is not finite."""
        self.schedule.check_losses()

    def tune(self) -> None:
        """Measures what is chosen by time (`dense_sums="auto"`), unless that is done or loaded. A
        collective; the first run does it by itself."""
        self.schedule.choices.tune()

    @property
    def precision(self) -> str:
        """In which it computes: fp32, tf32 or bf16."""
        return self.schedule.choices.precision

    def describe_choices(self) -> list[str]:
        """What was chosen by itself, and why: precision, and after `tune` the dense sums."""
        parts = self.schedule.parts
        split = [] if parts is None else [f"split histories ({parts.about})"]
        return [*self.schedule.choices.describe(), *split]

    def stop(self) -> None:
        """Ends the run on all ranks after the same step, one of the next three. Any rank, thread
        or signal handler may call it; the loop goes on until then. Between runs it ends the next
        one."""
        self.schedule.stop()

    @property
    def stopped(self) -> bool:
        """Whether `stop`, here or on another rank, ended the last run."""
        return self.schedule.stopped

    def flush(self) -> None:
        """Applies deferred row gradients, after which the tables are those of the serial schedule.
        Checkpoints, evaluations and other pipelines do it themselves. A collective."""
        self.schedule.flush()
        self.model.tables.lease.roll_back()

    def close(self) -> None:
        """Applies deferred gradients and gives threads and channels back to the transport. A
        collective."""
        self.schedule.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error the ranks may no longer be in step
            self.close()

    @property
    def steps(self) -> int:
        """Optimizer steps made so far."""
        return self.schedule.steps

    @property
    def model(self) -> ShardedModel:
        """The model that is trained."""
        return self.schedule.parallel

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of the dense parameters."""
        return self.schedule.optimizer

    @property
    def balancer(self) -> Balancer | None:
        """What distributes the samples of a global batch over the ranks."""
        return self.schedule.balancer

    @property
    def ledger(self) -> Ledger:
        """Spans, collectives and counters of this rank's steps."""
        return self.schedule.ledger

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON data: steps, what balancing has learned, the order of gradient sums, and what
        `auto` stood for."""
        return self.schedule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken, on any number of ranks."""
        self.schedule.load_state_dict(state)

    def __repr__(self) -> str:
        schedule = self.schedule
        balance = "none" if self.balancer is None else repr(self.balancer)
        return (
            f"Pipeline(schedule={type(schedule).__name__.lower()}, balance={balance}, "
            f"steps={self.steps}, rank {schedule.transport.rank} of {schedule.transport.world}, "
            f"optimizer={type(self.optimizer).__name__}, accumulate={schedule.accumulate}, "
            f"clip={schedule.clip}, precision={schedule.choices.precision})"
        )


def _choose_schedule(name: str, model: ShardedModel, accumulate: int) -> type[Schedule]:
    """What is staged is the traffic between ranks: a single rank has a schedule of its own, and an
    oracle of its own where products have padded sizes."""
    if model.transport.world > 1:
        return SCHEDULES[name]
    if name == "staged":
        return Single
    return SerialSingle if pads_products(model, accumulate) else SCHEDULES[name]
