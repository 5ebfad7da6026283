"""What a run that is started, or started again, does before its first step; and what is left to do
where no step is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freescale.train import milestones
from freescale.train.metrics_log import truncate_logs, was_tested

if TYPE_CHECKING:
    from freescale.train.trainer import Trainer


def begin_or_resume(trainer: Trainer, checkpoint: str) -> None:
    """Loads a checkpoint of a run that goes on, or places the tables of a new one. A collective.

    Args:
        trainer: whose parts are built.
        checkpoint: as `Checkpoints.find` names it.
    """
    if trainer.run_folder.resume:
        truncate_run(trainer, trainer.state.load(checkpoint))
    else:
        trainer.model.tables.place(trainer.data.batch(0))
    # without a step: the run folder has been checked for other runs
    trainer.checkpoints.check(trainer.model, trainer.optimizer, step=None)


def truncate_run(trainer: Trainer, step: int) -> None:
    """The logs end with the step that was loaded."""
    if trainer.rank == 0:
        truncate_logs(trainer.folder, step)


def complete_run(trainer: Trainer) -> dict[str, Any]:
    """Of a run that was started again after its last step: evaluates the test part, unless that was
    done. Returns the results, as `Trainer.train`. A collective."""
    trainer.run_folder.log_restarts(trainer.step)
    results: dict[str, Any] = {"stopped": 0}
    if trainer.best is not None:
        results["best"] = trainer.best.state_dict()
    tested = trainer.rank == 0 and was_tested(trainer.folder)
    known = trainer.transport.gather_bytes(b"1" if tested else b"")[0]
    if trainer.config.data.split != "none" and not known:
        results["test"] = milestones.test(trainer)
        trainer.callbacks.check()
    return results
