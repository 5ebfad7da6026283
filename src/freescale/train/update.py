"""Continues a finished run on newer data, in a run of its own: `freescale train --from RUN`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from shutil import copyfile
from typing import Any

from freescale.config import ModelConfig, RunConfig
from freescale.config.origin import KEPT, Origin
from freescale.config.recipe import expand_recipe
from freescale.data.batches.loader import Histories
from freescale.data.batches.specs import SplitSpec
from freescale.data.batches.windows import find_last_time
from freescale.data.features.store import ABOUT, FOLDER, WEIGHTS
from freescale.data.histories import HistoriesFile
from freescale.data.ingest.ids import VOCABULARY
from freescale.data.ingest.timestamps import guess_unit
from freescale.file_lock import lock
from freescale.stores.runs import find_checkpoints
from freescale.train.build import prepare_data
from freescale.train.run_folder import LOCK
from freescale.train.state.disk import read_state, sum_state
from freescale.train.state.intact import choose_step
from freescale.train.state.stored import open_folder

_FREE = {"dropout", "input_dropout", "temperature", "recompute"}  # settings of a model
# Other settings that a run has from the one that it continues.
_FIXED = {"max_length", "candidates", "columns", "features", "schema", "rows", "row_optimizer"}
_FILES = {"items", "users"}  # may move, but not come or go
_COPIED = (VOCABULARY, f"{FOLDER}/{ABOUT}", f"{FOLDER}/{WEIGHTS}")


def continue_run(
    run: Path,
    config: RunConfig,
    given: Mapping[str, Any],
    *,
    checkpoint: str | None = None,
    since: int | None = None,
    all_events: bool = False,
) -> RunConfig:
    """Makes the settings of a run that continues another one.

    Args:
        run: the folder of the finished run.
        config: its settings.
        given: settings of the new run by name, as `RunConfig.from_settings`; its own for others.
        checkpoint: `last`, `best` or a step. None: the best if the run keeps it, else the last.
        since: only later events are trained on. None: those after the run's last one.
        all_events: all events are trained on.

    Raises:
        ValueError: the run has no checkpoint, is being trained, or does not allow a setting.
    """
    if since is not None and all_events:
        raise ValueError("--since and --all-events exclude each other: leave one of them out")
    _refuse_other_model(run, config, expand_recipe(given))
    _refuse_live(run)
    path = _find_checkpoint(run, checkpoint)
    state = read_state(path)
    until = state["progress"].get("trained_until")
    if until is None and since is None and not all_events:
        until = _find_trained_until(config, state["progress"])
    origin = Origin(
        run=str(run),
        step=int(state["progress"]["step"]),
        checksum=sum_state(state),
        trained_until=until,
        since=None if all_events else until if since is None else since,
        rows={
            name: int(state["tables"][name][0])
            for name in ("item", "action")
            if name in state["tables"] and name not in config.dynamic_tables
        },
        kept=str(run),
    )
    if config.data.negatives_from == "all":  # as many as there are items
        config = replace(config, data=replace(config.data, negatives=None))
    return RunConfig.from_settings(given, replace(config, origin=origin))


def _refuse_live(run: Path) -> None:
    """Raises ValueError if the run is being trained."""
    if not (run / LOCK).exists():
        return
    with open(run / LOCK, encoding="utf-8") as file:
        try:
            lock(file.fileno(), wait=False, shared=True)
        except BlockingIOError:
            raise ValueError(
                f"{run} is still being trained ({file.read().strip()}): wait until it has ended"
            ) from None


def _find_checkpoint(run: Path, name: str | None) -> Path:
    files = open_folder(find_checkpoints(run))
    steps = files.steps()
    if not steps:
        raise ValueError(f"{run} holds no checkpoint to continue from: train it to its end first")
    step = choose_step(files.folder, name, files.read(steps[-1]).get("progress", {}))
    if step not in (None, *steps):
        raise ValueError(
            f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}"
        )
    return files.path(steps[-1] if step is None else step)


def _find_trained_until(config: RunConfig, progress: Mapping[str, Any]) -> int:
    """The time of the last event that an older run was trained on, from its data."""
    reason = "its data has changed since"
    try:
        file = HistoriesFile(
            prepare_data(config), config.data.num_items, "item" in config.dynamic_tables
        )
        if file.fingerprint == progress["data"]["fingerprint"]:
            found = find_last_time(file, SplitSpec(config.data.split, config.data.split_time))
            if found is not None:
                return found
    except ValueError as error:
        reason = str(error)
    raise ValueError(
        "the run does not say until when it was trained (an older version wrote it), and "
        f"{reason}: give --since TIME, the time of its last event, or --all-events"
    )


def _refuse_other_model(run: Path, config: RunConfig, given: Mapping[str, Any]) -> None:
    """Raises ValueError if a given setting is another one than the model of the run allows."""
    fixed = {entry.name for entry in fields(ModelConfig)} - _FREE | _FIXED
    known = vars(config.data) | vars(config.model) | vars(config.train)
    for name, value in given.items():
        was = known.get(name)
        new = value is not None and value != was
        if new and (name in fixed or (name in _FILES and was is None)):
            raise ValueError(
                f"--{name.replace('_', '-')} {value} with --from {run}: its model was trained with "
                f"{'none' if was in (None, '') else was}, and fits nothing else; leave it out, or "
                "train a new run"
            )


def check_new_data(config: RunConfig, data: Histories) -> None:
    """Raises ValueError if a run that continues another one has nothing to train on."""
    origin = config.origin
    if origin is None or origin.since is None:
        return
    latest = data.file.find_largest("timestamp")
    units = guess_unit(origin.since), guess_unit(latest)
    if None not in units and units[0] != units[1]:
        raise ValueError(
            f"{config.data.data}: times are in {units[1]}, and those that {origin.run} was trained "
            f"on in {units[0]}: bring them to the same unit"
        )
    if not data.num_samples:
        raise ValueError(
            f"nothing newer than {origin.since} in {config.data.data} (last event: {latest}; what "
            f"--split {config.data.split} holds out does not count): give newer data, an earlier "
            "--since, or --all-events"
        )


def keep_origin(origin: Origin, folder: Path) -> None:
    """Copies into the folder of a new run what it needs of the one that it continues."""
    source, target = Path(origin.kept), folder / KEPT
    if source.resolve() == target.resolve():
        return
    target.mkdir(exist_ok=True)
    for name in _COPIED:
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            copyfile(source / name, target / name)
