"""The training run: the loop over the parts that build.py makes. What a step does is the pipeline's
business."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from freescale.batch import SequenceBatch
from freescale.config import RunConfig
from freescale.data.ids import find_vocabulary
from freescale.data.workers import WorkerLoader, read_ahead
from freescale.ledger.collector import Collector
from freescale.pipeline.loss_watch import LossNotFinite
from freescale.pipeline.step_result import StepResult
from freescale.train.best import build_best
from freescale.train.build import (
    adopt_choices,
    build_model,
    build_optimizer,
    build_pipeline,
    count_workers,
    evaluate_part,
    load_histories,
    prepare_data,
)
from freescale.train.callbacks import Callback, CallbackList
from freescale.train.checkpoint import Checkpoints, NotFinite
from freescale.train.compile_kernels import compile_kernels
from freescale.train.device_figures import DeviceFigures
from freescale.train.metrics_log import MetricsLog, truncate_logs, was_tested
from freescale.train.progress import TensorBoardLog
from freescale.train.run_folder import AUTO, RunFolder
from freescale.train.run_state import RunState
from freescale.train.stop_signals import StopSignals
from freescale.transport.api import Transport
from freescale.transport.connect import connect
from freescale.transport.signs_of_life import name_silent_ranks

_NOTHING_SUPERVISED = (
    "no user of {data.data} has enough events for --split {data.split}: leave-one-out needs 4 or "
    "more events of a user, --split none needs 2"
)
_DIVERGED = "lower --lr and --row-lr, or set --clip and --row-clip"
_COLLECT_EVERY = 50  # steps between two collections of the ranks' ledgers


class Trainer:
    """A run in a folder: `Trainer(config).train()`.

    Every rank makes one with the same arguments; making one and `train` are collectives. Its parts
    are `data`, `model`, `optimizer`, `pipeline` and `checkpoints`.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path | str | None = None,
        *,
        resume: bool | str = False,
        callbacks: Sequence[Callback] = (),
        histories: Path | None = None,
        transport: Transport | None = None,
    ) -> None:
        """Builds everything and, with `resume`, loads a checkpoint of the folder.

        Args:
            config: what to train on what, and how.
            folder: of the run. None makes a new one under runs/ when training begins.
            resume: go on from the last checkpoint in `folder`; or from another, by name: "best" or
                a step. Checkpoints after it are given up. "auto": go on from the last checkpoint if
                there is one, else begin.
            callbacks: are called at steps, evaluations and checkpoints, on every rank.
            histories: the prepared histories file. None prepares `config.data.data`.
            transport: joins the ranks. None connects by torchrun's environment, or as one process,
                and disconnects after training.

        Raises:
            ValueError: if the folder holds another run, there is nothing to resume, or the data,
                the model and the checkpoint do not fit each other.
        """
        self.config = config
        self._histories = histories if histories is not None else prepare_data(config)
        self._connected = transport is None
        settings = config.train
        self.transport = transport = (
            connect(settings.device, settings.timeout, settings.transport)
            if transport is None
            else transport
        )
        self._run_folder = RunFolder(Path(folder) if folder else None, resume, transport)
        with self._run_folder.note_failure(lambda: 0), name_silent_ranks(transport):
            self._build(callbacks)
            self._begin(resume if isinstance(resume, str) and resume != AUTO else "last")

    def _build(self, callbacks: Sequence[Callback]) -> None:
        config, settings, transport = self.config, self.config.train, self.transport
        self.data = load_histories(config, self._histories, transport)
        # the run's config.json keeps it, and a resumed run repeats it
        self.config = config = adopt_choices(config, self.data)
        self.total = self._count_steps(0)
        self.model = build_model(config, self.data, transport)
        self.optimizer = build_optimizer(config, self.model)
        self.pipeline = build_pipeline(config, self.model, self.optimizer, self.total)
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints",
            transport,
            settings.keep_checkpoints,
            full_every=settings.full_every,
            asynchronous=settings.async_checkpoints,
        )
        self.best = build_best(config)  # evaluation so far, where evaluations are compared
        self._state = RunState(
            self.checkpoints, self.model, self.optimizer, self.pipeline, self.data, self.best
        )
        self._number = -1  # of the last batch that was applied
        own: list[Callback] = [MetricsLog(), DeviceFigures(settings.profile_steps)]
        own += [TensorBoardLog()] if settings.tensorboard else []
        self._callbacks = CallbackList([*own, *callbacks], transport)

    def _begin(self, checkpoint: str) -> None:
        """Loads a checkpoint of a run that goes on, or places the tables of a new one."""
        if self._run_folder.resume:
            step = self._state.load(checkpoint)
            self._go_on_from(step)
        else:
            self.model.tables.place(self.data.batch(0))
        # without a step: the run folder has been checked for other runs
        self.checkpoints.check(self.model, self.optimizer, step=None)

    def _go_on_from(self, step: int) -> None:
        """After a checkpoint was loaded: the logs end with it, too."""
        self._number = self.data.start - 1
        self.total = self._count_steps(len(self._state.skipped))
        if self.rank == 0:
            truncate_logs(self.folder, step)

    # ---- where the run stands

    @property
    def folder(self) -> Path:
        """A default name is final once training has begun."""
        return self._run_folder.path

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def step(self) -> int:
        """Steps made so far, those of a resumed run included."""
        return self.pipeline.steps

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete."""
        return self._next // self.data.batches_per_epoch

    @property
    def is_complete(self) -> bool:
        """Whether no step is left to make."""
        return self.step >= self.total or (self.best is not None and self.best.exhausted)

    @property
    def notes(self) -> list[str]:
        """What a person should know about the folder and what was resumed from it."""
        return [*self._run_folder.notes, *self._state.notes]

    # ---- training

    def stop(self) -> None:
        """Ends training on all ranks after the same step, one of the next three, as if `steps` had
        been that many: with a checkpoint and the test evaluation. May be called on any rank."""
        self.pipeline.stop()

    def train(self, signals: StopSignals | None = None) -> dict[str, Any]:
        """Trains to the end of the configuration, or until `stop`, `patience` or a signal ends it.

        With `keep="best"` the test part is evaluated with the best checkpoint, which `model` holds
        afterwards.

        Args:
            signals: listens for SIGTERM, SIGUSR1 and Ctrl-C. Without it signals do what they do
                elsewhere.

        Returns:
            `loss` of the last step, `test` with the metrics of the test part, `ledger` (on rank 0)
            and `stopped`: the number of the signal that ended the run, or 0. Where evaluations are
            compared, `best` with its `metric`, `value`, `step` and whether it is `kept`.

        Raises:
            ValueError: if nothing is left to train, or the model diverges.
            RemoteError: if another rank fails.
        """
        with self._hold_folder():
            if self._run_folder.is_auto and self.is_complete:
                results = self._complete()
            else:
                self._open_folder()
                results = self._train(signals or StopSignals(self.stop, self.rank))
            self._run_folder.note_result(results["stopped"], self.step)
        if self._connected:  # after an error the ranks may no longer be in step
            self.transport.close()
        return results

    def iterate(self) -> Iterator[StepResult]:
        """The steps of `train`, for a program with a loop of its own: logs, evaluations and
        checkpoints are made as they fall due, the last checkpoint and the test part are left out.
        A collective, like each of its steps."""
        with self._hold_folder():
            self._open_folder()
            self._callbacks.call("on_start", self)
            try:
                yield from self._loop(self._start_ledger(), StopSignals(self.stop, self.rank))
            except GeneratorExit:  # the program's own decision
                self._run_folder.note_result(0, self.step)
                raise
            self._note_checkpoint()
            self._run_folder.note_result(0, self.step)

    @contextmanager
    def _hold_folder(self) -> Iterator[None]:
        """The run's folder is this run's until the end of the block, however it ends."""
        try:
            with (
                self._run_folder.note_failure(lambda: self.step),
                name_silent_ranks(self.transport),
            ):
                yield
        finally:
            self._run_folder.close()

    def _open_folder(self) -> None:
        if self.step >= self.total:
            raise ValueError(self._explain_end())
        if self.best is not None and self.best.exhausted:
            raise ValueError(
                f"{self.folder} ended at step {self.step}, after {self.best.since} evaluations "
                "without a better one: pass a larger --patience to continue"
            )
        # First of all: while kernels are compiled, the workers come up.
        batches = self._read_ahead()
        try:
            compile_kernels(
                self.config,
                self.pipeline.precision,
                self.data.num_actions > 0,
                self.transport.device,
                lambda done, count: self._callbacks.call("on_compile", self, done, count),
            )
            self.pipeline.tune()  # before the run is described
            self._run_folder.open(self.config.to_json(), find_vocabulary(self._histories))
            self._run_folder.log_restarts(self.step)
        except BaseException as error:
            batches.__exit__(type(error), error, None)
            raise
        self._batches = batches
        self.checkpoints.folder = self.folder / "checkpoints"

    def _read_ahead(self) -> AbstractContextManager[Iterator[SequenceBatch]]:
        kind = self.transport.device.type
        return read_ahead(self.data, count_workers(self.config, kind), pin=kind == "cuda")

    def _count_steps(self, skipped: int) -> int:
        """Of the whole run, without batches that are left out."""
        there = self.data.stop - skipped
        return min(there, self.config.train.steps or there)

    def _explain_end(self) -> str:
        """Why nothing is left to train, and which setting makes more of it."""
        settings = self.config.train
        made = f"nothing is left to train: {self.folder} has made {self.step:,} steps"
        if settings.steps is not None and settings.steps <= self.data.stop:
            return f"{made}, and --steps is {settings.steps:,}: pass a larger --steps to continue"
        larger = f" (--steps {settings.steps:,} alone does not)" if settings.steps else ""
        return (
            f"{made}, and --epochs {settings.epochs} ends after {self.data.stop:,}: "
            f"pass a larger --epochs to continue{larger}"
        )

    def _complete(self) -> dict[str, Any]:
        """A run that was started again after its last step: what is left is the test part, unless
        it was evaluated."""
        self._run_folder.log_restarts(self.step)
        results: dict[str, Any] = {"stopped": 0}
        if self.best is not None:
            results["best"] = self.best.state_dict()
        tested = self.rank == 0 and was_tested(self.folder)
        known = self.transport.gather_bytes(b"1" if tested else b"")[0]
        if self.config.data.split != "none" and not known:
            self._load_best()
            results["test"] = self._evaluate("test")
            self._callbacks.check()
        return results

    def _train(self, signals: StopSignals) -> dict[str, Any]:
        self._callbacks.call("on_start", self)
        results: dict[str, Any] = {}
        collector, last = self._start_ledger(), None
        try:
            for step in self._loop(collector, signals):
                last = step
            self._callbacks.check()
            signals.lift_limit()
            if last is not None:
                results["loss"] = last.loss
                self._checkpoint(last=True)
        except LossNotFinite as error:
            raise ValueError(
                f"the loss is {error.loss} at step {error.step}: {_DIVERGED}"
            ) from error
        except NotFinite as error:
            raise ValueError(f"{error}; {_DIVERGED}") from None
        signals.saved = True
        collector.collect()
        self._report_slow(collector)
        results["ledger"] = collector.close(self.transport.device)
        # Whichever rank got a signal: all skip what is left.
        numbers = self.transport.gather_bytes(b"%d" % signals.number)
        results["stopped"] = max(map(int, numbers))
        if self.best is not None:
            results["best"] = self.best.state_dict()
        if not results["stopped"]:
            signals.close()
            if self.config.data.split != "none":
                self._load_best()
                results["test"] = self._evaluate("test")
        self._callbacks.call("on_end", self, results)
        self._callbacks.check()
        return results

    def _loop(self, collector: Collector, signals: StopSignals) -> Iterator[StepResult]:
        """Trains until the data or --steps ends, or a rank asks to stop. Yields each step once all
        that it entails is done. Where a loss is not finite, some steps may come again."""
        while True:
            try:
                yield from self._make_steps(collector, signals)
                return
            except LossNotFinite as error:
                self._roll_back(error, collector)

    def _make_steps(self, collector: Collector, signals: StopSignals) -> Iterator[StepResult]:
        settings = self.config.train
        clock, seen, supervised = time.perf_counter(), 0, 0.0
        with ExitStack() as stack:
            batches = stack.enter_context(self._batches)
            if isinstance(batches, WorkerLoader):
                batches.wait_until_up()
            guarded = self._callbacks.guard(batches, self._state.skipped)
            # closed with the loop, also where an error leaves it: all ranks leave together
            steps = cast("Generator[StepResult, None, None]", self.pipeline.run(guarded))
            for last in stack.enter_context(closing(steps)):
                self._number = last.batch_number
                signals.note_step()
                self._callbacks.call("on_step", self, last)
                seen += self.data.batch_size(last.batch_number)
                if self.step % settings.log_every == 0 or self.step == self.total:
                    loss = last.loss  # waits for the device, hence not every step
                    rate = seen / (time.perf_counter() - clock)
                    clock, seen = time.perf_counter(), 0
                    self._log(loss, rate)
                if self.step % _COLLECT_EVERY == 0:
                    collector.collect()
                    self._report_slow(collector)
                supervised += sum(last.counts.values())
                if not supervised and (self._ends_epoch or self.step == self.total):
                    raise ValueError(_NOTHING_SUPERVISED.format(data=self.config.data))
                with signals.suspend_limit():
                    self._validate()
                    ended = self.is_complete
                    saves = self.step % settings.checkpoint_every == 0
                    if ended or saves:
                        self.pipeline.check_losses()
                    if saves and not ended:
                        self._checkpoint()
                yield last
                if ended:
                    break

    def _roll_back(self, error: LossNotFinite, collector: Collector) -> None:
        """Goes back to the last checkpoint, without the batch whose loss is not finite; the second
        time it raises the error. A collective."""
        if self.config.train.on_nonfinite != "rollback" or self._state.skipped:
            raise error
        with suppress(NotFinite):  # the one before it is the last, then
            self._note_checkpoint()
        found = self.rank == 0 and self.checkpoints.latest() is not None
        if not self.transport.gather_bytes(b"1" if found else b"")[0]:
            raise error
        step = self._state.roll_back(error.batch_number)
        collector.collect()  # what the ledgers still hold is cut off with the rest
        self._go_on_from(step)
        collector.restart()
        back = {"at_step": error.step, "loss": str(error.loss)}
        back |= {"skipped_batch": error.batch_number}
        self._callbacks.call("on_rollback", self, {"step": step, "rollback": back})
        self._batches = self._read_ahead()

    def _report_slow(self, collector: Collector) -> None:
        for entry in collector.take_slow_steps():
            self._callbacks.call("on_slow_step", self, entry)

    @property
    def _next(self) -> int:
        """Number of the batch after the last that was applied."""
        number = self._number + 1
        while number in self._state.skipped:
            number += 1
        return number

    @property
    def _ends_epoch(self) -> bool:
        return self.epoch > self._number // self.data.batches_per_epoch

    def _log(self, loss: float, rate: float) -> None:
        epoch = self._number // self.data.batches_per_epoch
        entry = {"step": self.step, "epoch": epoch, "loss": loss, "samples_per_second": rate}
        self._callbacks.call("on_log", self, entry)

    def _validate(self) -> None:
        every = self.config.train.evaluate_every
        due = every is not None and self._ends_epoch and self.epoch % every == 0
        if due and self.config.data.split != "none":
            self._evaluate("validation")
            if self.best is not None and self.best.kept and self.best.step == self.step:
                self._checkpoint()

    def _evaluate(self, part: str) -> dict[str, dict[str, float]]:
        metrics = evaluate_part(
            self.config, self.model, self._histories, part, baseline=part == "test"
        )
        if self.best is not None and part == "validation":
            self.best.note(self.step, metrics["model"])
        self._callbacks.call("on_evaluation", self, metrics, part)
        return metrics

    def _load_best(self) -> None:
        best = self.best
        if best is not None and best.kept and best.step not in (None, self.step):
            self.checkpoints.load(self.checkpoints.find("best"), self.model)

    def _checkpoint(self, last: bool = False) -> None:
        """Saves this step. An asynchronous checkpoint is complete at the next one, or at the
        `last`."""
        self._note_checkpoint()
        self._state.save(self._number)
        if last or not self.checkpoints.asynchronous:
            self._note_checkpoint()

    def _note_checkpoint(self) -> None:
        path = self.checkpoints.wait()
        if path is not None:
            self._callbacks.call("on_checkpoint", self, path)

    def _start_ledger(self) -> Collector:
        transport = self.transport
        return Collector(
            self.pipeline.ledger,
            transport.rank,
            transport.world,
            transport.gather_bytes,
            self.folder if self.rank == 0 else None,
            offsets=transport.clock_offsets,
            trace_steps=self.config.train.trace_steps,
            resumed=self._run_folder.resume,
            restarts=self._run_folder.restarts,
        )
