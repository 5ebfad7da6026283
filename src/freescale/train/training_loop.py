"""The training loop: the steps of a run, and what falls due after each of them. What a step does is
the pipeline's business."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from typing import TYPE_CHECKING, cast

from freescale.batch import SequenceBatch
from freescale.data.batches.splits import WANTED
from freescale.data.batches.workers import read_ahead
from freescale.launch.signals import StopSignals
from freescale.ledger.collector import Collector
from freescale.pipeline.loss_watch import LossNotFinite
from freescale.pipeline.step_result import StepResult
from freescale.train.milestones import save_checkpoint, take_snapshot, validate_if_due
from freescale.train.rollback import roll_back
from freescale.worker_server import count_workers

if TYPE_CHECKING:
    from freescale.train.trainer import Trainer

_NOTHING_SUPERVISED = "no user of {data.data} has enough events for --split {data.split}: " + WANTED
_COLLECT_EVERY = 50  # steps between two collections of the ranks' ledgers

Batches = AbstractContextManager[Iterator[SequenceBatch]]


def read_batches(trainer: Trainer) -> Batches:
    """The batches of this rank, from where the run stands. Workers start at once."""
    kind = trainer.transport.device.type
    count = count_workers(trainer.config, kind)
    server = trainer.get_worker_server() if count else None
    return read_ahead(trainer.data, count, kind == "cuda", server)


def start_ledger(trainer: Trainer) -> Collector:
    """Collects the ledgers of all ranks into the run's folder."""
    transport = trainer.transport
    return Collector(
        trainer.pipeline.ledger,
        transport.rank,
        transport.world,
        transport.gather_bytes,
        trainer.folder if trainer.rank == 0 else None,
        offsets=transport.clock_offsets,
        trace_steps=trainer.config.train.trace_steps,
        resumed=trainer.run_folder.resume,
        restarts=trainer.run_folder.restarts,
    )


class TrainingLoop:
    """The steps of a run, once its folder is open."""

    def __init__(self, trainer: Trainer, signals: StopSignals, batches: Batches) -> None:
        self._trainer, self._signals, self._batches = trainer, signals, batches
        self.collector = start_ledger(trainer)

    def run(self) -> Iterator[StepResult]:
        """Trains until the data or --steps ends, or a rank asks to stop. Yields each step once all
        that it entails is done. Where a loss is not finite, some steps may come again."""
        while True:
            try:
                yield from self._make_steps()
                return
            except LossNotFinite as error:
                roll_back(self._trainer, error, self.collector)
                self._batches = read_batches(self._trainer)

    def _make_steps(self) -> Iterator[StepResult]:
        trainer, position, signals = self._trainer, self._trainer.position, self._signals
        settings = trainer.config.train
        clock, seen, supervised = time.perf_counter(), 0, 0.0
        with ExitStack() as stack:
            batches = stack.enter_context(self._batches)
            guarded = trainer.callbacks.guard(batches, position.skipped)
            # closed with the loop, also where an error leaves it: all ranks leave together
            steps = cast("Generator[StepResult, None, None]", trainer.pipeline.run(guarded))
            for last in stack.enter_context(closing(steps)):
                position.number = last.batch_number
                signals.note_step()
                trainer.callbacks.call("on_step", trainer, last)
                seen += trainer.data.batch_size(last.batch_number)
                if position.step % settings.log_every == 0 or position.step == position.total:
                    loss = last.loss  # waits for the device, hence not every step
                    rate = seen / (time.perf_counter() - clock)
                    clock, seen = time.perf_counter(), 0
                    self._log(loss, rate)
                if position.step % _COLLECT_EVERY == 0:
                    self.collect()
                supervised += sum(last.counts.values())
                if not supervised and (position.ends_epoch or position.step == position.total):
                    raise ValueError(_NOTHING_SUPERVISED.format(data=trainer.config.data))
                with signals.suspend_limit():
                    validate_if_due(trainer)
                    ended = position.is_complete
                    saves = position.step % settings.checkpoint_every == 0
                    if ended or saves:
                        trainer.pipeline.check_losses()
                    if saves and not ended:
                        save_checkpoint(trainer)
                    if trainer.snapshots is not None and not ended:  # behind the checkpoint
                        take_snapshot(trainer)
                yield last
                if ended:
                    break

    def collect(self) -> None:
        """The ledgers of all ranks. A collective."""
        self.collector.collect()
        for entry in self.collector.take_slow_steps():
            self._trainer.callbacks.call("on_slow_step", self._trainer, entry)

    def _log(self, loss: float, rate: float) -> None:
        trainer, position = self._trainer, self._trainer.position
        epoch = position.number // trainer.data.batches_per_epoch
        entry = {"step": position.step, "epoch": epoch, "loss": loss, "samples_per_second": rate}
        trainer.callbacks.call("on_log", trainer, entry)
