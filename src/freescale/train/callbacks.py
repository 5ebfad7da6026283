"""Hooks of a training run: what happens at a step, a log line, an evaluation, a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from freescale.batch import SequenceBatch
from freescale.config import RunConfig
from freescale.pipeline.step_result import StepResult
from freescale.transport.api import Transport
from freescale.transport.failures import raise_together

if TYPE_CHECKING:  # they import pyarrow and kernels
    from freescale.data.batches.loader import Histories
    from freescale.embedding.sharded_model import ShardedModel
    from freescale.pipeline.pipeline import Pipeline
    from freescale.train.position import Best
    from freescale.train.state.checkpoints import Checkpoints

Metrics = Mapping[str, Mapping[str, float]]  # {"model": {"hr@10": 0.1}, "popularity": {...}}


class RunView(Protocol):
    """What a callback sees of its run. It is the `Trainer`; only `stop` changes anything."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def folder(self) -> Path: ...

    @property
    def rank(self) -> int: ...

    @property
    def step(self) -> int:
        """Steps made so far, those of a resumed run included."""

    @property
    def total(self) -> int:
        """Steps that the run ends with."""

    @property
    def epoch(self) -> int:
        """Complete passes over the data."""

    @property
    def window(self) -> Mapping[str, int] | None:
        """In order of time, the window that was evaluated last: its `number` among those of the
        data, and its times (`from`, and `to` without it)."""

    @property
    def best(self) -> Best | None:
        """The best evaluation so far, if evaluations are compared."""

    @property
    def notes(self) -> list[str]:
        """What a person should know about the folder and what was resumed from it."""

    @property
    def data(self) -> Histories: ...

    @property
    def model(self) -> ShardedModel: ...

    @property
    def pipeline(self) -> Pipeline: ...

    @property
    def checkpoints(self) -> Checkpoints: ...

    @property
    def transport(self) -> Transport: ...

    def stop(self) -> None:
        """Ends training on all ranks after the same step, one of the next three."""


class Callback:
    """Override the hooks you need; the others do nothing.

    Every hook runs on every rank, in the main thread, in the order in which the callbacks were
    given; use `trainer.rank` to act on one rank only. A hook must not call collectives unless all
    ranks do so.

    A hook may call `trainer.stop()`, on any rank. It may also raise: then no further hook runs on
    that rank, and within three steps the run ends on all ranks. The rank itself raises the
    exception, the others a RemoteError that quotes it. Nothing more is saved.
    """

    def on_compile(self, trainer: RunView, done: int, count: int) -> None:
        """While GPU kernels are compiled that are not in the cache: before the first of `count`,
        with `done` 0, and after each. Called on one rank of each machine."""

    def on_start(self, trainer: RunView) -> None:
        """Before the first step. The model is built or loaded and `trainer.folder` exists."""

    def on_step(self, trainer: RunView, step: StepResult) -> None:
        """After each step. Losses in `step` are tensors on the device: reading one (`step.loss`)
        waits for the device, so do not read one in every step."""

    def on_log(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        """Every `log_every` steps and after the last one, with the line of metrics.jsonl: `step`,
        `epoch`, `loss` (the mean over the global batch) and `samples_per_second`."""

    def on_evaluation(self, trainer: RunView, metrics: Metrics, part: str) -> None:
        """After an evaluation, with its metrics, which are the same on every rank: of the
        `validation` part every `evaluate_every` epochs, of the `test` part at the end."""

    def on_checkpoint(self, trainer: RunView, path: Path) -> None:
        """After a checkpoint is complete, with its folder."""

    def on_window(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        """After a window of a stream (`--follow`) was trained, when a checkpoint that contains it
        is on disk. The line of metrics.jsonl: its `step`, and in `stream` the `number` of the
        window and its figures (`Stream` writes them into its manifest). A run that resumes at the
        end of a window calls it again, with `again`: what it did before may have been
        interrupted."""

    def on_rollback(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        """After `--on-nonfinite rollback` has loaded the last checkpoint, with the line of
        metrics.jsonl: its `step`, and in `rollback` the `loss`, the step that had it (`at_step`),
        and the `skipped_batch`."""

    def on_slow_step(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        """On rank 0, when the ledgers of the ranks are collected, for a step that took much longer
        than those before it. Its entry in ledger.json: `step`, and in `slow_step` its `seconds`,
        the `usual` ones and a description of what it waited for (`why`)."""

    def on_snapshot_interval(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        """When snapshots become less frequent, because one takes longer than the steps between two
        of them or, with `auto`, more than 1 % of these. The line of metrics.jsonl: `step`, and in
        `snapshot_interval` the new interval (`steps`), the setting (key `asked`), the
        `seconds` of a snapshot and the share of training spent on it (`percent`)."""

    def on_snapshot_cost(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        """Once, when snapshots at the configured interval take more than 1 % of training. The
        entry is that of `on_snapshot_interval`, under `snapshot_cost`."""

    def on_end(self, trainer: RunView, results: Mapping[str, Any]) -> None:
        """At the end of a run that did not fail, with the results of `Trainer.train`."""


class CallbackList:
    """Calls the hooks of a run's callbacks. An exception in one of them ends all ranks."""

    def __init__(self, callbacks: Sequence[Callback], run: RunView) -> None:
        self._callbacks, self._transport = list(callbacks), run.transport
        self._run = weakref.ref(run)  # no reference cycle: a dropped Trainer is freed at once
        self.failure: Exception | None = None  # of the first hook that failed on this rank

    def call(self, hook: str, *args: Any) -> None:
        """Calls the hook of each callback, unless one of them has failed on this rank."""
        for callback in self._callbacks:
            if self.failure is None:
                try:
                    getattr(callback, hook)(self._run(), *args)
                except Exception as error:
                    self.failure = error

    def guard(self, batches: Iterator[SequenceBatch], skipped: Collection[int]) -> GuardedBatches:
        """Leaves out the batches with a number in `skipped`. Raises the exception of a failed hook
        as if the data had failed: then the pipeline ends on all ranks after the same step."""
        return GuardedBatches(batches, skipped, self)

    def check(self) -> None:
        """Raises on all ranks if a hook has failed on one. A collective."""
        raise_together(self.failure, self._transport)


class GuardedBatches(Iterator[SequenceBatch]):
    """The batches of an iterator except some. A failure is raised in place of the next one."""

    is_lasting = True  # the loader does not overwrite a batch that it has returned

    def __init__(
        self, batches: Iterator[SequenceBatch], skipped: Collection[int], callbacks: CallbackList
    ) -> None:
        self._batches, self._skipped, self._callbacks = batches, skipped, callbacks

    def __next__(self) -> SequenceBatch:
        batch = next(self._batches)
        while batch.number in self._skipped:
            batch = next(self._batches)
        if self._callbacks.failure is not None:
            raise self._callbacks.failure
        return batch

    def wait_for_next(self) -> None:
        """Waits until the next batch is ready, if the iterator can tell."""
        wait = getattr(self._batches, "wait_for_next", None)
        if wait is not None:
            wait()
