"""What a run does beside its steps: evaluations and checkpoints. All of them are collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freescale.train.trainer import Trainer


def validate_if_due(trainer: Trainer) -> None:
    """Evaluates the validation part at the end of an epoch that asks for it; where it is the best
    so far and that one is kept, it is saved."""
    every, position, best = trainer.config.train.evaluate_every, trainer.position, trainer.best
    due = every is not None and position.ends_epoch and position.epoch % every == 0
    if due and trainer.config.data.split != "none":
        trainer.evaluate("validation")
        if best is not None and best.kept and best.step == position.step:
            save_checkpoint(trainer)


def test(trainer: Trainer) -> dict[str, dict[str, float]]:
    """Evaluates the test part, with the best checkpoint where that is kept."""
    best = trainer.best
    if best is not None and best.kept and best.step not in (None, trainer.step):
        trainer.checkpoints.load(trainer.checkpoints.find("best"), trainer.model)
    return trainer.evaluate("test")


def take_snapshot(trainer: Trainer) -> None:
    """Begins a snapshot of this step, if one is due."""
    assert trainer.snapshots is not None
    line = trainer.snapshots.take_if_due(trainer.state, trainer.callbacks.failed)
    if line is not None:
        (kind,) = line
        trainer.callbacks.call(f"on_{kind}", trainer, {"step": trainer.step, **line})


def save_checkpoint(trainer: Trainer, last: bool = False) -> None:
    """Saves this step, unless a hook has failed on a rank: then all ranks raise. An asynchronous
    checkpoint is complete at the next one, or at the `last`."""
    complete_checkpoint(trainer)
    trainer.callbacks.check()
    trainer.state.save()
    if last or not trainer.checkpoints.asynchronous:
        complete_checkpoint(trainer)


def complete_checkpoint(trainer: Trainer) -> None:
    """Waits for the checkpoint that is being written, if there is one, and tells callbacks."""
    path = trainer.checkpoints.wait()
    if path is not None:
        trainer.callbacks.call("on_checkpoint", trainer, path)
