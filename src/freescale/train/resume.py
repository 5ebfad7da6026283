"""How a run begins or resumes, and what a run without remaining steps still does."""

from __future__ import annotations

from typing import Any

from freescale.train.metrics_log import truncate_logs, was_tested
from freescale.train.run import Run
from freescale.train.state.found import FoundSnapshots
from freescale.train.state.snapshots import Snapshots
from freescale.transport.failures import run_on_rank_0


def begin_or_resume(run: Run, checkpoint: str) -> None:
    """Loads a checkpoint of a run that resumes, or places the tables of a new one. A collective.

    Args:
        run: the run; its parts are built.
        checkpoint: a name that `Checkpoints.find` understands.
    """
    state = run.state
    state.checkpoints.claim()
    if run.folder.resume:
        _load(run, checkpoint)
    else:
        _begin(run)
    # without a step: the run folder has been checked for other runs
    state.checkpoints.check(state.model, state.optimizer, step=None)


def has_snapshot(snapshots: Snapshots | None, run: str) -> bool:
    """Whether a snapshot of a run, complete for all ranks, is in memory. A collective."""
    found = snapshots.find(run) if snapshots is not None else None
    return found is not None and found.choose() is not None


def _begin(run: Run) -> None:
    """Places the tables, and loads the model of the run that this one continues, if any."""
    state, origin = run.state, run.config.origin
    if not state.model.tables.placed:
        state.model.tables.place(state.position.data.batch(0))
    if origin is not None:
        state.begin_from(origin)


def _load(run: Run, checkpoint: str) -> None:
    """Restores the newest state, in memory or on disk; a named checkpoint, from disk."""
    snapshots, state = run.snapshots, run.state
    if snapshots is None:
        state.load(checkpoint)
        return
    found = snapshots.find(run.folder.run_id) if checkpoint == "last" else None
    if found is not None and _load_snapshot(run, found):
        return
    if checkpoint == "last" and not state.checkpoints.last_step():  # it has only had snapshots
        _begin(run)
        state.notes.append("begun anew: the run has no checkpoint")
    else:
        state.load(checkpoint)
    snapshots.clear()
    if found is not None and found.choose() is None:
        state.notes.append(f"not from memory: {found.explain_none()}")


def _load_snapshot(run: Run, found: FoundSnapshots) -> bool:
    """Loads the newest state if it is in memory."""
    state = run.state
    loaded = found.load_newest(state.checkpoints, state.model, state.optimizer)
    if loaded is None:
        return False
    choice, contents = loaded
    state.go_on_from(contents["progress"])
    state.checkpoints.adopt_parent(contents["checkpoint"], state.model.tables, choice.step)
    state.notes.append(f"resumed after step {choice.step:,}, {found.describe(choice)}")
    return True


def give_up_later(run: Run) -> None:
    """Gives up checkpoints and log lines after the loaded step. Logs come last: they always have at
    least the steps of the last checkpoint. A collective."""
    run.state.checkpoints.give_up_later()
    folder = run.folder.path
    run_on_rank_0(run.transport, lambda: truncate_logs(folder, run.position.step), str(folder))


def complete_run(run: Run) -> dict[str, Any]:
    """Evaluates the test part of a run that was started again after its last step, unless that was
    done before. Returns the results, as `Trainer.train`. A collective."""
    give_up_later(run)
    step = run.position.step
    run.folder.log_restarts(step)
    results: dict[str, Any] = {"stopped": 0}
    if run.position.best is not None:
        results["best"] = run.position.best.state_dict()
    tested = run.transport.rank == 0 and was_tested(run.folder.path, step)
    known = run.transport.gather_bytes(b"1" if tested else b"")[0]
    if run.config.data.split != "none" and run.follower is None and not known:
        results["test"] = run.test()
        run.callbacks.check()
    return results
