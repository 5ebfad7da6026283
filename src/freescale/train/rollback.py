"""`--on-nonfinite rollback`: back to the last checkpoint, and on without the batch whose loss is
not finite."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from freescale.ledger.collector import Collector
from freescale.pipeline.loss_watch import LossNotFinite
from freescale.train.checkpoint import NotFinite
from freescale.train.milestones import complete_checkpoint
from freescale.train.resume import give_up_later

if TYPE_CHECKING:
    from freescale.train.trainer import Trainer


def roll_back(trainer: Trainer, error: LossNotFinite, collector: Collector) -> None:
    """Loads the last checkpoint and leaves out the batch. Raises the error if that is not asked
    for, there is no checkpoint, or it happens for the second time. A collective."""
    position, checkpoints = trainer.position, trainer.checkpoints
    if trainer.config.train.on_nonfinite != "rollback" or position.skipped:
        raise error
    with suppress(NotFinite):  # the one before it is the last, then
        complete_checkpoint(trainer)
    found = trainer.rank == 0 and checkpoints.latest() is not None
    if not trainer.transport.gather_bytes(b"1" if found else b"")[0]:
        raise error
    step = trainer.state.load()
    if trainer.snapshots is not None:
        trainer.snapshots.forget()
    position.skipped.append(error.batch_number)
    collector.collect()  # what the ledgers still hold is cut off with the rest
    give_up_later(trainer)
    collector.restart()
    back = {"at_step": error.step, "loss": str(error.loss)}
    back |= {"skipped_batch": error.batch_number}
    trainer.callbacks.call("on_rollback", trainer, {"step": step, "rollback": back})
