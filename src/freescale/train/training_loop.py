"""The training loop: the steps of a run, and what falls due after each of them. The pipeline
decides what a step does."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from typing import cast

from freescale.batch import SequenceBatch
from freescale.data.batches.splits import WANTED
from freescale.data.batches.workers import read_ahead
from freescale.launch.signals import StopSignals
from freescale.ledger.collector import Collector
from freescale.pipeline.loss_watch import LossNotFinite
from freescale.pipeline.step_result import StepResult
from freescale.train.resume import give_up_later
from freescale.train.run import Run
from freescale.train.state.finite_check import NotFinite
from freescale.worker_server import WorkerServer, count_workers

_NOTHING_SUPERVISED = "no user of {data.data} has enough events for --split {data.split}: " + WANTED
_COLLECT_EVERY = 50  # steps between two collections of the ranks' ledgers

Batches = AbstractContextManager[Iterator[SequenceBatch]]


def read_batches(run: Run) -> Batches:
    """Reads this rank's batches from where the run stands. Workers start at once."""
    kind = run.transport.device.type
    count = count_workers(run.config, kind)
    if count and (run.worker_server is None or not run.worker_server.is_open):
        run.worker_server = WorkerServer()
    return read_ahead(run.position.data, count, kind == "cuda", run.worker_server)


class TrainingLoop:
    """The steps of a run whose folder is open."""

    def __init__(self, run: Run, signals: StopSignals, batches: Batches) -> None:
        self._run, self._signals, self._batches = run, signals, batches
        transport = run.transport
        self.collector = Collector(
            run.position.pipeline.ledger,
            transport.rank,
            transport.world,
            transport.gather_bytes,
            run.folder.path if transport.rank == 0 else None,
            offsets=transport.clock_offsets,
            trace_steps=run.config.train.trace_steps,
            resumed=run.folder.resume,
            restarts=run.folder.restarts,
        )

    def run(self) -> Iterator[StepResult]:
        """Trains until the data or --steps ends, or a rank stops it. Yields each step after its
        logs, evaluations and checkpoints. After a rollback, steps may be repeated."""
        while True:
            try:
                yield from self._make_steps()
                if not self._open_next_window():
                    return
            except LossNotFinite as error:
                self._roll_back(error)
                self._batches = read_batches(self._run)

    def _open_next_window(self) -> bool:
        """Whether a window of a stream follows, which is then awaited. A collective."""
        run, position = self._run, self._run.position
        if run.follower is None or position.pipeline.stopped or position.is_complete:
            return False
        with self._signals.suspend_limit():
            run.end_window()
            run.callbacks.check()
            going_on = run.begin_window()
        if going_on:
            self._batches = read_batches(run)
        return going_on

    def _make_steps(self) -> Iterator[StepResult]:
        run, position, signals = self._run, self._run.position, self._signals
        settings = run.config.train
        clock, seen, supervised = time.perf_counter(), 0, 0.0
        with ExitStack() as stack:
            batches = stack.enter_context(self._batches)
            guarded = run.callbacks.guard(batches, position.skipped)
            # closed with the loop, also after an error: all ranks leave together
            steps = cast("Generator[StepResult, None, None]", position.pipeline.run(guarded))
            for last in stack.enter_context(closing(steps)):
                position.number = last.batch_number
                signals.note_step()
                run.callbacks.call("on_step", last)
                seen += position.data.batch_size(last.batch_number)
                if position.step % settings.log_every == 0 or position.step == position.total:
                    loss = last.loss  # waits for the device, hence not every step
                    rate = seen / (time.perf_counter() - clock)
                    clock, seen = time.perf_counter(), 0
                    self._log(loss, rate)
                if position.step % _COLLECT_EVERY == 0:
                    self.collect()
                supervised += sum(last.counts.values())
                if not supervised and (position.ends_epoch or position.step == position.total):
                    raise ValueError(_NOTHING_SUPERVISED.format(data=run.config.data))
                with signals.suspend_limit():
                    run.validate_if_due()
                    ended = position.is_complete
                    saves = position.step % settings.checkpoint_every == 0 or run.is_delta_due()
                    if ended or saves:
                        position.pipeline.check_losses()
                    if saves and not ended:
                        run.save_checkpoint()
                    if not ended:  # after the checkpoint
                        run.take_snapshot()
                yield last
                if ended:
                    break

    def collect(self) -> None:
        """Collects the ledgers of all ranks. A collective."""
        self.collector.collect()
        for entry in self.collector.take_slow_steps():
            self._run.callbacks.call("on_slow_step", entry)

    def _log(self, loss: float, rate: float) -> None:
        position = self._run.position
        epoch, follower = position.data.find_epoch(position.number), self._run.follower
        epoch = epoch if follower is None else follower.window["number"]
        entry = {"step": position.step, "epoch": epoch, "loss": loss, "samples_per_second": rate}
        self._run.callbacks.call("on_log", entry)

    def _roll_back(self, error: LossNotFinite) -> None:
        """Loads the last checkpoint and skips the batch whose loss is not finite. Raises the error
        without `--on-nonfinite rollback`, without a checkpoint, or the second time. A
        collective."""
        run, position = self._run, self._run.position
        if run.config.train.on_nonfinite != "rollback" or position.skipped:
            raise error
        with suppress(NotFinite):  # then the checkpoint before it is the last
            run.complete_checkpoint()
        if not run.state.checkpoints.last_step():
            raise error
        step = run.state.load()
        if run.snapshots is not None:
            run.snapshots.forget()
        position.skipped.append(error.batch_number)
        self.collector.collect()  # what the ledgers still hold is cut off with the rest
        give_up_later(run)
        self.collector.restart()
        rollback = {
            "at_step": error.step,
            "loss": str(error.loss),
            "skipped_batch": error.batch_number,
        }
        run.callbacks.call("on_rollback", {"step": step, "rollback": rollback})
