"""`freescale.torchrec.Pipeline`: trains a TorchRec model, by `progress(iterator)` as TorchRec's own
pipelines do, or by `run`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from freescale.balance.balancer import Balancer
from freescale.balance.problem import Partitioner
from freescale.batch import SequenceBatch
from freescale.config import TrainConfig
from freescale.pipeline import pipeline
from freescale.pipeline.schedule import Schedule
from freescale.pipeline.step_result import StepResult
from freescale.torchrec.batches import BatchForm
from freescale.torchrec.sharded_model import ShardedModel


class _Feed:
    """The batches of an iterator that can be replaced by another, as `SequenceBatch`es."""

    def __init__(self, source: Iterator[Any], form: BatchForm) -> None:
        self.source = source
        self._form, self._count = form, 0

    def __iter__(self) -> Iterator[SequenceBatch]:
        return self

    def __next__(self) -> SequenceBatch:
        batch = self._form.encode(next(self.source), self._count)
        self._count += 1
        return batch


class Pipeline(pipeline.Pipeline):
    """Trains a model of `freescale.torchrec.parallelize`. Every rank creates one with the same
    arguments.

    Args:
        model: the result of `freescale.torchrec.parallelize`.
        optimizer: a torch optimizer of `model.dense_parameters()`.
        cost_feature: the feature whose length is the cost of a sample, for balancing. None: the
            number of ids of all features.
        balance: as in `freescale.Pipeline`. Do not balance a model whose samples depend on each
            other (batch norm, attention divided by the batch's longest history);
            `freescale.check_samples_independent(model, batch)` checks it.
        schedule, accumulate, clip, precision, learning_rate, dense_sums, check: as in
            `freescale.Pipeline`.

    Raises:
        TypeError: `model` is something else.
        ValueError: an option has no such value.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: str | Callable[..., Schedule] = TrainConfig.schedule,
        balance: str | Partitioner | Balancer | None = None,
        cost_feature: str | None = None,
        accumulate: int = TrainConfig.accumulate,
        clip: float | None = None,
        precision: str = "fp32",
        learning_rate: Callable[[int], float] | None = None,
        dense_sums: str = TrainConfig.dense_sums,
        check: bool = True,
    ) -> None:
        if not isinstance(model, ShardedModel):
            raise TypeError(
                f"this Pipeline trains what freescale.torchrec.parallelize returns, not a "
                f"{type(model).__module__}.{type(model).__name__}"
            )
        if balance is not None and balance != "none" and not isinstance(balance, Balancer):
            balance = Balancer(balance, feature=cost_feature)
        elif cost_feature is not None:
            raise ValueError(
                f"cost_feature={cost_feature!r} needs balance='greedy', or another partitioner; a "
                "Balancer has a feature of its own"
            )
        super().__init__(
            model,
            optimizer,
            schedule=schedule,
            balance=balance,
            accumulate=accumulate,
            clip=clip,
            precision=precision,
            learning_rate=learning_rate,
            dense_sums=dense_sums,
            check=check,
        )
        self._form, self._module = model.form, model.module
        self._feed: _Feed | None = None
        self._progress: Iterator[StepResult] | None = None
        self.last: StepResult | None = None
        """The result of the last step that `progress` made: its loss over all ranks."""

    def run(self, batches: Iterable[Any]) -> Iterator[StepResult]:
        """Like `freescale.Pipeline.run`, over batches in the model's form."""
        source = iter(batches)
        if self._feed is None or self._feed.source is not source:
            self._feed = _Feed(source, self._form)
        return super().run(self._feed)

    def progress(self, iterator: Iterator[Any]) -> Any:
        """Makes one step with the next batch of `iterator`; later batches are read ahead. With
        another iterator than the last time, batches that were read ahead come first. A collective:
        a rank whose data has ended takes part until the data of all ranks has.

        Returns:
            The model's outputs other than the loss, for the samples that this rank computed (of its
            last micro-batch); None if it had none.

        Raises:
            StopIteration: the data of all ranks has ended.
        """
        if self._progress is None:
            self._progress = self.run(iterator)
        elif self._feed is not None and self._feed.source is not iterator:
            self._feed.source = iterator
        self._module.outputs = None
        try:
            self.last = next(self._progress)
        except BaseException:
            self._progress = None
            raise
        outputs, self._module.outputs = self._module.outputs, None
        return outputs
