"""What a run that is started, or started again, does before its first step; and what is left to do
where no step is left."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from freescale.train import milestones
from freescale.train.checkpoint import Damaged
from freescale.train.metrics_log import truncate_logs, was_tested
from freescale.transport.failures import run_on_rank_0

if TYPE_CHECKING:
    from freescale.train.snapshot.restoring import Restoring
    from freescale.train.trainer import Trainer


def begin_or_resume(trainer: Trainer, checkpoint: str) -> None:
    """Loads a checkpoint of a run that goes on, or places the tables of a new one. A collective.

    Args:
        trainer: whose parts are built.
        checkpoint: as `Checkpoints.find` names it.
    """
    if trainer.run_folder.resume:
        _load(trainer, checkpoint)
    else:
        trainer.model.tables.place(trainer.data.batch(0))
    # without a step: the run folder has been checked for other runs
    trainer.checkpoints.check(trainer.model, trainer.optimizer, step=None)


def remembers(trainer: Trainer, run: str) -> bool:
    """Whether a snapshot of a run, complete for all ranks, is in memory. A collective."""
    found = trainer.snapshots.find(run) if trainer.snapshots is not None else None
    return found is not None and found.choose() is not None


def _load(trainer: Trainer, checkpoint: str) -> int:
    """Restores the newest state there is, in memory or on disk; a checkpoint that is named, from
    disk. Returns its step."""
    snapshots = trainer.snapshots
    if snapshots is None:
        return trainer.state.load(checkpoint)
    found = snapshots.find(trainer.run_folder.run_id) if checkpoint == "last" else None
    step = _load_snapshot(trainer, found) if found is not None else None
    if step is None:
        step = _load_checkpoint(trainer, checkpoint)
        snapshots.clear()
        if found is not None and found.choose() is None:
            trainer.state.notes.append(f"not from memory: {found.explain_none()}")
    return step


def _load_snapshot(trainer: Trainer, found: Restoring) -> int | None:
    """The newest snapshot that is complete for all ranks and intact, unless a checkpoint is newer.
    Returns its step."""
    state, checkpoints = trainer.state, trainer.checkpoints
    while (choice := found.choose()) is not None:
        if _find_last_saved(trainer) > choice.step and _is_newer_intact(trainer, choice.step):
            return None
        try:
            said = found.load(choice, trainer.model, trainer.optimizer, trainer.pipeline.reducer)
        except Damaged as error:
            if trainer.rank == 0:
                warnings.warn(f"{error}. Taking one before", stacklevel=2)
            found.refused.append(choice.step)
            continue
        state.go_on_from(said["progress"])
        checkpoints.adopt_parent(said["checkpoint"], trainer.model.tables, choice.step)
        state.notes.append(f"resumed after step {choice.step:,}, {found.describe(choice)}")
        return choice.step
    return None


def _find_last_saved(trainer: Trainer) -> int:
    """The step of the last checkpoint by its name, or 0."""
    steps = trainer.checkpoints.steps() if trainer.rank == 0 else []
    said = trainer.transport.gather_bytes(str(steps[-1] if steps else 0).encode())
    return int(said[0])


def _is_newer_intact(trainer: Trainer, step: int) -> bool:
    try:
        saved = trainer.checkpoints.last_intact()
    except Damaged:
        return False
    return saved is not None and int(saved.state["progress"]["step"]) > step


def _load_checkpoint(trainer: Trainer, checkpoint: str) -> int:
    """Where the run has none, because its snapshots were the first that it saved, it begins."""
    if checkpoint == "last" and not _find_last_saved(trainer):
        if not trainer.model.tables.placed:
            trainer.model.tables.place(trainer.data.batch(0))
        trainer.state.notes.append("begun anew: the run has no checkpoint")
        return 0
    return trainer.state.load(checkpoint)


def give_up_later(trainer: Trainer) -> None:
    """The run goes on from the step that was loaded: what was saved and logged after it is past.
    Logs come last, so that they hold at least the steps of the last checkpoint. A collective."""
    trainer.checkpoints.give_up_later()

    def truncate() -> None:
        truncate_logs(trainer.folder, trainer.step)

    run_on_rank_0(trainer.transport, truncate, str(trainer.folder))


def complete_run(trainer: Trainer) -> dict[str, Any]:
    """Of a run that was started again after its last step: evaluates the test part, unless that was
    done. Returns the results, as `Trainer.train`. A collective."""
    give_up_later(trainer)
    trainer.run_folder.log_restarts(trainer.step)
    results: dict[str, Any] = {"stopped": 0}
    if trainer.best is not None:
        results["best"] = trainer.best.state_dict()
    tested = trainer.rank == 0 and was_tested(trainer.folder, trainer.step)
    known = trainer.transport.gather_bytes(b"1" if tested else b"")[0]
    if trainer.config.data.split != "none" and not known:
        results["test"] = milestones.test(trainer)
        trainer.callbacks.check()
    return results
