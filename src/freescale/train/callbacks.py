"""Hooks of a training run: what happens at a step, a log line, an evaluation, a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freescale.batch import SequenceBatch
from freescale.pipeline.step_result import StepResult
from freescale.transport.api import Transport
from freescale.transport.failures import raise_together

if TYPE_CHECKING:
    from freescale.train.trainer import Trainer

Metrics = Mapping[str, Mapping[str, float]]  # {"model": {"hr@10": 0.1}, "popularity": {...}}


class Callback:
    """Overrides the hooks it needs; the others do nothing.

    Every hook runs on every rank, in the main thread, in the order in which the callbacks were
    given; use `trainer.rank` to act on one rank only. A hook must not call collectives unless all
    ranks do so.

    A hook may call `trainer.stop()`, on any rank. It may raise: then no hook of that rank runs any
    more, and within three steps the run ends on all ranks. The rank itself raises the exception,
    the others a RemoteError that quotes it; nothing more is saved.
    """

    def on_compile(self, trainer: Trainer, done: int, count: int) -> None:
        """On a GPU, while the `count` kernels that the run needs and no earlier run has left behind
        are compiled: before the first, with `done` 0, and after each. On a machine with several
        ranks it is called on one of them."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step. The model is built or loaded and `trainer.folder` exists."""

    def on_step(self, trainer: Trainer, step: StepResult) -> None:
        """After each step. Losses in `step` are tensors on the device: reading one (`step.loss`)
        waits for the device, so do not read one in every step."""

    def on_log(self, trainer: Trainer, entry: Mapping[str, Any]) -> None:
        """Every `log_every` steps and after the last one, with the line of metrics.jsonl: `step`,
        `epoch`, `loss` (the mean over the global batch) and `samples_per_second`."""

    def on_evaluation(self, trainer: Trainer, metrics: Metrics, part: str) -> None:
        """After an evaluation, with its metrics, which are the same on every rank: of the
        `validation` part every `evaluate_every` epochs, of the `test` part at the end."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """After a checkpoint is complete, with its folder."""

    def on_rollback(self, trainer: Trainer, entry: Mapping[str, Any]) -> None:
        """After `--on-nonfinite rollback` has loaded the last checkpoint, with the line of
        metrics.jsonl: its `step`, and in `rollback` the `loss`, the step that had it (`at_step`),
        and the `skipped_batch`."""

    def on_slow_step(self, trainer: Trainer, entry: Mapping[str, Any]) -> None:
        """On rank 0, when the ledgers of the ranks are collected: of a step that took much longer
        than those before it, with what ledger.json keeps of it: `step`, and in `slow_step` its
        `seconds`, the `usual` ones and what it waited for, in words (`why`)."""

    def on_snapshot_interval(self, trainer: Trainer, entry: Mapping[str, Any]) -> None:
        """When snapshots are taken less often, because one takes longer than the steps between two
        of them or, with `auto`, more than 1 % of these; with the line of metrics.jsonl: `step`, and
        in `snapshot_interval` the `steps` that they are apart from now on, what was `asked` for,
        the `seconds` that one takes and the `percent` of training that its computing is."""

    def on_snapshot_cost(self, trainer: Trainer, entry: Mapping[str, Any]) -> None:
        """Once, when snapshots as often as asked for take more than 1 % of training; as
        `on_snapshot_interval`, in `snapshot_cost`."""

    def on_end(self, trainer: Trainer, results: Mapping[str, Any]) -> None:
        """At the end of a run that did not fail, with what `Trainer.train` returns."""


class CallbackList:
    """Calls the hooks of several callbacks; makes an exception in one of them end all ranks."""

    def __init__(self, callbacks: Sequence[Callback], transport: Transport) -> None:
        self._callbacks, self._transport = list(callbacks), transport
        self._failure: Exception | None = None

    def call(self, hook: str, *args: Any) -> None:
        """Calls the hook of each callback, unless one of them has failed on this rank."""
        for callback in self._callbacks:
            if self._failure is None:
                try:
                    getattr(callback, hook)(*args)
                except Exception as error:
                    self._failure = error

    @property
    def failed(self) -> bool:
        """Whether a hook has failed on this rank."""
        return self._failure is not None

    def guard(
        self, batches: Iterator[SequenceBatch], skipped: Collection[int] = ()
    ) -> GuardedBatches:
        """The batches but those with a number in `skipped`, until a hook has failed: then its
        exception, as if the data had failed. The pipeline ends on all ranks after the same step
        when the data of one fails."""
        return GuardedBatches(batches, skipped, lambda: self._failure)

    def check(self) -> None:
        """Raises on all ranks if a hook has failed on one. A collective."""
        raise_together(self._failure, self._transport)


class GuardedBatches(Iterator[SequenceBatch]):
    """The batches of an iterator but for some, until there is a failure, which is raised in place
    of the next one."""

    is_lasting = True  # readers of histories, in threads and workers, leave alone what was taken

    def __init__(
        self,
        batches: Iterator[SequenceBatch],
        skipped: Collection[int],
        failure: Callable[[], Exception | None],
    ) -> None:
        self._batches, self._skipped, self._failure = batches, skipped, failure

    def __next__(self) -> SequenceBatch:
        batch = next(self._batches)
        while batch.number in self._skipped:
            batch = next(self._batches)
        failure = self._failure()
        if failure is not None:
            raise failure
        return batch

    def wait_for_next(self) -> None:
        """Until the next batch is there, where the iterator can tell."""
        wait = getattr(self._batches, "wait_for_next", None)
        if wait is not None:
            wait()
