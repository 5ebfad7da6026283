"""The command train."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.layout import GroupedCommand, grouped_option
from freescale.cli.options import PATH, add_settings, format_arguments, select_given
from freescale.cli.runs import (
    DISTRIBUTION,
    add_nproc,
    add_port,
    prepare_data,
    read_config,
    refuse_missing_data,
)
from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from freescale.config.recipe import list_recipes
from freescale.launch.ranks import follow_launcher, is_rank
from freescale.stores.path import StorePath
from freescale.stores.runs import find_checkpoints, open_run
from freescale.worker_server import start_early

_OUTPUT = "Output"  # a heading

# What other programs call the options of train.
_OTHER_NAMES = {
    "--global-batch": "batch-size bs train-batch-size",
    "--data": "dataset data-path input train-data",
    "--width": "dim embedding-dim hidden-size hidden-units",
    "--layers": "num-layers num-blocks",
    "--heads": "num-heads",
    "--lr": "learning-rate",
    "--max-length": "max-len maxlen max-seq-len",
    "--steps": "max-steps",
    "--epochs": "num-epochs",
    "--nproc": "gpus nproc-per-node world-size",
    "--workers": "num-workers",
    "--negatives": "num-negatives",
    "--folder": "out output output-dir run",
    "--dropout": "dropout-rate",
    "--warmup": "warmup-steps",
    "--precision": "dtype",
    "--restarts": "max-restarts",
}


@click.command(
    cls=GroupedCommand,
    other_names={name: own for own, names in _OTHER_NAMES.items() for name in names.split()},
)
@add_settings(DataConfig, ModelConfig, TrainConfig)
@grouped_option(
    "--from",
    "origin",
    heading="Data",
    common=True,
    type=PATH,
    metavar="RUN",
    help="continue a finished run on newer data, in a run of its own: --data has the events of RUN "
    "and those after them, which alone are trained on",
)
@grouped_option(
    "--since",
    heading="Data",
    type=int,
    help="with --from: train on events later than this timestamp  [default: the last one that RUN "
    "was trained on]",
)
@grouped_option(
    "--all-events",
    heading="Data",
    is_flag=True,
    default=None,
    help="with --from: train on all events again, not only on the new ones",
)
@grouped_option(
    "--checkpoint",
    heading="Data",
    help="with --from: begin with `last`, `best` or a step  [default: the best if RUN keeps it]",
)
@add_nproc
@grouped_option(
    "--folder",
    "run_folder",
    heading=_OUTPUT,
    common=True,
    type=PATH,
    help="folder of the run  [default: runs/DATE-TIME]",
)
@grouped_option(
    "--resume",
    heading=_OUTPUT,
    common=True,
    is_flag=False,
    flag_value="last",
    metavar="[CHECKPOINT]",
    help=(
        "continue the run in --folder, on any number of ranks, from its last checkpoint, or from "
        "`best` or the step named (later checkpoints are given up); `auto`: if there is a "
        "checkpoint, else start"
    ),
)
@grouped_option(
    "--restarts",
    heading=DISTRIBUTION,
    common=True,
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="how often to restart the ranks of this machine after a failure",
)
@add_port
@exit_cleanly
def train(
    nproc: int,
    run_folder: Path | None,
    resume: str | None,
    restarts: int,
    port: int | None,
    origin: Path | None,
    since: int | None,
    all_events: bool | None,
    checkpoint: str | None,
    **given: Any,
) -> int:
    """Train a model on your data, on one rank or many.

    --nproc starts the ranks of this machine; under torchrun, the command joins torchrun's ranks.

    Example: freescale train --data histories.parquet --nproc 2
    """
    if given.get("recipe") == "list":
        found = list_recipes()
        width = max(len(recipe.name) for recipe in found)
        for recipe in found:
            click.echo(f"{recipe.name:{width}}  {recipe.description}")
        return 0
    update = {"from": origin, "since": since, "all_events": all_events, "checkpoint": checkpoint}
    return train_run(nproc, run_folder, resume, port, given, restarts, update)


def train_run(
    nproc: int,
    run_folder: Path | None,
    resume: str | None,
    port: int | None,
    given: dict[str, Any],
    restarts: int = 0,
    update: Mapping[str, Any] | None = None,
) -> int:
    """Trains as one rank, or starts `nproc` ranks. The arguments are the options of `train`;
    `given` are its settings, `update` those of --from and what goes with it. Returns the exit
    status."""
    update = select_given(update or {})
    run_folder = run_folder and open_run(run_folder, trains=True)
    update |= {"from": open_run(update["from"])} if "from" in update else {}
    config = _make_config(run_folder, resume, given, update)
    launches = not is_rank() and (nproc > 1 or restarts)
    server = None if launches else start_early(config)  # it imports torch in parallel with us
    if not is_rank():
        if nproc > 1 and config.train.device != "cpu":
            from freescale.transport.connect import choose_device

            choose_device(config.train.device, 0, nproc)  # refuses missing GPUs
        if config.data.follow is None:
            prepare_data(config)
        elif run_folder is None:  # the events are kept there
            from freescale.train.run_folder import new_folder

            run_folder = new_folder(Path("runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S"))
        if restarts or (nproc > 1 and config.train.snapshot_every):
            given = {**given, **update}
            return _launch_with_restarts(nproc, run_folder, resume, port, given, restarts)
        if nproc > 1:
            from freescale.launch.ranks import launch

            # without a folder, rank 0 finds a name that is free
            own = {"folder": run_folder, "resume": resume, **update}
            return launch(["train", *format_arguments(given | own)], nproc, port)
    follow_launcher()
    from freescale.train.commands import run_training

    return run_training(config, run_folder, resume, lambda: prepare_data(config), server)


def _make_config(
    run_folder: Path | None, resume: str | None, given: dict[str, Any], update: Mapping[str, Any]
) -> RunConfig:
    """The settings of a new run, of one that resumes, or of one that continues another."""
    how = dict(update)
    base, origin = _read_base(run_folder, resume), how.pop("from", None)
    if origin is None and how:
        option = next(iter(how)).replace("_", "-")
        raise ValueError(f"--{option} needs --from: name the folder of the run to continue")
    if base is not None and origin is not None and resume != "auto":
        raise ValueError(
            f"--from with --resume {resume}: the run in {run_folder} knows what it continues; "
            "leave --from out"
        )
    source = run_folder if base is not None else origin
    before = base or (read_config(origin) if origin is not None else None)
    if before is None or source is None:
        return RunConfig.from_settings(given)
    if given.get("data") is None:
        refuse_missing_data(before, source)
    if base is not None:
        return RunConfig.from_settings(given, base)
    from freescale.train.update import continue_run

    return continue_run(source, before, given, **how)


def _read_base(run_folder: Path | None, resume: str | None) -> RunConfig | None:
    """The settings of the run to continue; None for a new run."""
    if resume is None:
        return None
    if run_folder is None:
        auto = " or start" if resume == "auto" else ""
        raise ValueError(f"--resume needs --folder: name the folder of the run to continue{auto}")
    if resume == "auto" and not _holds_run(run_folder):
        return None
    return read_config(run_folder)


def _holds_run(run_folder: Path) -> bool:
    """Whether a run with a checkpoint is in the folder."""
    folder = find_checkpoints(run_folder)
    if isinstance(folder, StorePath):
        from freescale.train.state.stored import open_folder

        return bool(open_folder(folder).steps())
    return (run_folder / "config.json").exists() and any(folder.glob("step-*/state.json"))


def _launch_with_restarts(
    nproc: int,
    run_folder: Path | None,
    resume: str | None,
    port: int | None,
    given: dict[str, Any],
    restarts: int,
) -> int:
    """Launches ranks with restarts. Also for runs with snapshots and no restarts, to end the
    snapshots with the run."""
    from freescale.launch.restarts import launch_with_restarts
    from freescale.train.run_folder import new_folder
    from freescale.train.state.holder_link import end_holder
    from freescale.transport.machine import identify_machine

    if restarts and resume not in (None, "last", "auto"):
        raise ValueError(
            f"--restarts continues from the last checkpoint, --resume {resume} from another: leave "
            "one of them out"
        )
    if resume is None and run_folder is not None and _holds_run(run_folder):
        raise ValueError(
            f"{run_folder} already holds a run: name another folder, or pass --resume to continue "
            "it"
        )
    # all attempts need the same folder
    name = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    folder = run_folder or new_folder(Path("runs") / name)
    arguments = ["train", *format_arguments(given), "--folder", str(folder)]
    status = launch_with_restarts(
        *(arguments, nproc, port, restarts, folder, resume),
        end_snapshots=lambda: end_holder(folder, identify_machine()),
    )
    if run_folder is None:
        with suppress(OSError):  # a run that never began leaves no folder
            folder.rmdir()
    return status
