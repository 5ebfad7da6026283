"""The commands around a run: train, eval, export and demo."""

from __future__ import annotations

import glob
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.layout import GroupedCommand, GroupedOption
from freescale.cli.options import add_settings, format_arguments
from freescale.cli.progress import show_progress
from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from freescale.config.recipe import list_recipes
from freescale.launch.ranks import follow_launcher, is_rank
from freescale.worker_server import may_have_gpu, start_early

_DISTRIBUTION, _OUTPUT = "Distribution", "Output"

# What other programs call the options of train.
_OTHER_NAMES = {
    "batch-size": "--global-batch",
    "bs": "--global-batch",
    "train-batch-size": "--global-batch",
    "dataset": "--data",
    "data-path": "--data",
    "input": "--data",
    "train-data": "--data",
    "dim": "--width",
    "embedding-dim": "--width",
    "hidden-size": "--width",
    "hidden-units": "--width",
    "num-layers": "--layers",
    "num-blocks": "--layers",
    "num-heads": "--heads",
    "learning-rate": "--lr",
    "max-len": "--max-length",
    "maxlen": "--max-length",
    "max-seq-len": "--max-length",
    "max-steps": "--steps",
    "num-epochs": "--epochs",
    "gpus": "--nproc",
    "nproc-per-node": "--nproc",
    "num-workers": "--workers",
    "world-size": "--nproc",
    "num-negatives": "--negatives",
    "out": "--folder",
    "output": "--folder",
    "output-dir": "--folder",
    "run": "--folder",
    "dropout-rate": "--dropout",
    "warmup-steps": "--warmup",
    "dtype": "--precision",
    "max-restarts": "--restarts",
}

_nproc = click.option(
    "--nproc",
    cls=GroupedOption,
    heading=_DISTRIBUTION,
    common=True,
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="ranks (processes) to start on this machine: as many as it has GPUs",
)
_port = click.option(
    "--port",
    cls=GroupedOption,
    heading=_DISTRIBUTION,
    type=click.IntRange(1, 65535),
    help="port where local ranks meet  [default: a free one]",
)


@click.command(cls=GroupedCommand, other_names=_OTHER_NAMES)
@add_settings(DataConfig, ModelConfig, TrainConfig)
@_nproc
@click.option(
    "--folder",
    "run_folder",
    cls=GroupedOption,
    heading=_OUTPUT,
    common=True,
    type=click.Path(path_type=Path),
    help="folder of the run  [default: runs/DATE-TIME]",
)
@click.option(
    "--resume",
    cls=GroupedOption,
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
@click.option(
    "--restarts",
    cls=GroupedOption,
    heading=_DISTRIBUTION,
    common=True,
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="how often to start the ranks of this machine again after a failure",
)
@_port
@exit_cleanly
def train(
    nproc: int,
    run_folder: Path | None,
    resume: str | None,
    restarts: int,
    port: int | None,
    **given: Any,
) -> int:
    """Train a model on your data, on one rank or many.

    --nproc starts the ranks of this machine; under torchrun, the command joins torchrun's ranks.

    Example: freescale train --data histories.parquet --nproc 2
    """
    if given.get("recipe") == "list":
        return show_recipes()
    return train_run(nproc, run_folder, resume, port, given, restarts)


def show_recipes() -> int:
    """Prints the recipes of the package, a line each."""
    found = list_recipes()
    width = max(len(recipe.name) for recipe in found)
    for recipe in found:
        click.echo(f"{recipe.name:{width}}  {recipe.description}")
    return 0


def train_run(
    nproc: int,
    run_folder: Path | None,
    resume: str | None,
    port: int | None,
    given: dict[str, Any],
    restarts: int = 0,
) -> int:
    """Trains as one rank, or starts `nproc` of them.

    Args:
        nproc: ranks to start.
        run_folder: of the run; None makes a new one.
        resume: the checkpoint of the folder to go on from, or `auto`; None for a new run.
        port: where the ranks meet.
        given: settings that were given.
        restarts: how often the ranks are started again after a failure.

    Returns:
        The exit status.
    """
    base = _read_base(run_folder, resume)
    if base is not None and given.get("data") is None:
        assert run_folder is not None
        _refuse_missing_data(base, run_folder)
    config = RunConfig.from_settings(given, base)
    launches = not is_rank() and (nproc > 1 or restarts)
    server = None if launches else start_early(config)  # it imports torch while we do
    if not is_rank():
        if nproc > 1:
            _refuse_missing_gpus(config.train.device, nproc)
        _prepare(config)
        if restarts or (nproc > 1 and config.train.snapshot_every):
            return _launch_with_restarts(nproc, run_folder, resume, port, given, restarts)
        if nproc > 1:
            from freescale.launch.ranks import launch

            # without a folder, rank 0 finds a name that is free
            where = ["--folder", str(run_folder)] if run_folder else []
            arguments = ["train", *format_arguments(given), *where]
            return launch([*arguments, *(["--resume", resume] if resume else [])], nproc, port)
    follow_launcher()
    from freescale.train.commands import run_training

    return run_training(config, run_folder, resume, lambda: _prepare(config), server)


def _read_base(run_folder: Path | None, resume: str | None) -> RunConfig | None:
    """The settings of a run that is continued; None if a new one is to be started."""
    if resume is None:
        return None
    if run_folder is None:
        auto = " or start" if resume == "auto" else ""
        raise ValueError(f"--resume needs --folder: name the folder of the run to continue{auto}")
    if resume == "auto" and not _holds_run(run_folder):
        return None
    return _read_config(run_folder)


def _holds_run(run_folder: Path) -> bool:
    """Whether a run with a checkpoint is in the folder."""
    return (run_folder / "config.json").exists() and any(
        (run_folder / "checkpoints").glob("step-*/state.json")
    )


def _launch_with_restarts(
    nproc: int,
    run_folder: Path | None,
    resume: str | None,
    port: int | None,
    given: dict[str, Any],
    restarts: int,
) -> int:
    """Also of a run with snapshots that is not to be started again: they go with it."""
    from freescale.launch.restarts import launch_with_restarts
    from freescale.train.run_folder import new_folder
    from freescale.train.snapshot.keeper_link import end_keeper
    from freescale.transport.machine import identify_machine

    if restarts and resume not in (None, "last", "auto"):
        raise ValueError(
            f"--restarts goes on from the last checkpoint, --resume {resume} from another: leave "
            "one of them out"
        )
    if resume is None and run_folder is not None and _holds_run(run_folder):
        raise ValueError(
            f"{run_folder} already holds a run: name another folder, or pass --resume to continue "
            "it"
        )
    # all attempts need the same one
    name = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    folder = run_folder or new_folder(Path("runs") / name)
    arguments = ["train", *format_arguments(given), "--folder", str(folder)]
    status = launch_with_restarts(
        *(arguments, nproc, port, restarts, folder, resume),
        end_snapshots=lambda: end_keeper(folder, identify_machine()),
    )
    if run_folder is None:
        with suppress(OSError):  # a run that never began leaves no folder
            folder.rmdir()
    return status


def _read_config(run_folder: Path) -> RunConfig:
    path = run_folder / "config.json"
    if not run_folder.is_dir():
        raise ValueError(f"{run_folder} is not the folder of a run: there is no such folder")
    if not path.exists():
        raise ValueError(f"{run_folder} is not the folder of a run: it has no config.json")
    return RunConfig.from_json(path.read_text(encoding="utf-8"))


def _refuse_missing_data(config: RunConfig, run_folder: Path) -> None:
    """Refuses a path of config.json that leads nowhere from here: most often the run was started in
    another folder."""
    data = config.data.data
    if "://" not in data and not glob.glob(data):
        raise ValueError(
            f"{data}: no such file, seen from {Path.cwd()}; {run_folder / 'config.json'} names it "
            "so: pass --data with its path, or run the command where the run was started"
        )


def _refuse_missing_gpus(device: str, nproc: int) -> None:
    if device == "cpu":
        return
    from freescale.transport.connect import choose_device

    choose_device(device, 0, nproc)


def _count_gpus() -> int:
    if not may_have_gpu():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _prepare(config: RunConfig) -> Path:
    """The histories file of the data. One process of a machine makes it; the others wait for it."""
    from freescale.train.build import prepare_data

    with show_progress() as progress:
        return prepare_data(config, progress)


_checkpoint = click.option(
    "--checkpoint",
    help="last, best or a step  [default: the best of a run with --keep best, else the last]",
)


@click.command("eval")
@click.argument("run_folder", type=click.Path(path_type=Path))
@_checkpoint
@click.option("--data", help="another data file than the run's own")
@click.option(
    "--device",
    type=click.Choice(("auto", "cpu", "cuda")),
    help="another device than the run's own",
)
@click.option(
    "--part",
    type=click.Choice(("validation", "test")),
    default="test",
    show_default=True,
    help="part of the split",
)
@click.option(
    "--ranks",
    type=click.Path(path_type=Path),
    help="CSV file for the rank of every user's target, with the ids of the data (retrieval)",
)
@_nproc
@_port
@exit_cleanly
def evaluate(
    run_folder: Path,
    checkpoint: str | None,
    data: str | None,
    device: str | None,
    part: str,
    ranks: Path | None,
    nproc: int,
    port: int | None,
) -> int:
    """Evaluate a run's checkpoint on held-out data.

    Ranks every target among all items of the catalogue, and shows the popularity baseline beside
    the model. Ranking tasks are evaluated by NE, AUC and GAUC. All metrics are written to
    eval-PART.json in the run's folder, those of other data to eval-PART-DIGEST.json.
    """
    given = {"data": data, "device": device}
    config = RunConfig.from_settings(given, _read_config(run_folder))
    if data is None:
        _refuse_missing_data(config, run_folder)
    if not is_rank():
        try:
            _prepare(config)
        except ValueError as error:
            if data is not None or "no such file" not in str(error):
                raise
            raise ValueError(
                f"{error}; the run was started in another folder, or its data has moved: say "
                "where it is with --data"
            ) from None
        if nproc > 1:
            from freescale.launch.ranks import launch

            options = format_arguments({**given, "checkpoint": checkpoint, "ranks": ranks})
            arguments = ["eval", str(run_folder), "--part", part, *options]
            return launch(arguments, nproc, port)
    from freescale.train.commands import run_evaluation

    run_evaluation(config, run_folder, part, lambda: _prepare(config), checkpoint, ranks)
    return 0


@click.command()
@click.argument("run_folder", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="folder for the safetensors files"
)
@click.option("--overwrite", is_flag=True, help="replace an export that --out holds")
@_checkpoint
@exit_cleanly
def export(run_folder: Path, out: Path, overwrite: bool, checkpoint: str | None) -> None:
    """Write a run's checkpoint as safetensors files.

    The files are for serving, and plain torch can load them.

    Dense weights are one file; each table is a file of its own, with its rows in the order of ids.
    Where ids of the data were numbered anew, vocabulary.parquet says which id has which row.
    """
    from freescale.train.export import export_run

    for path in export_run(run_folder, out, checkpoint, overwrite):
        click.echo(path)


@click.command()
@click.option("--nproc", type=click.IntRange(1), default=2, show_default=True, help="ranks")
@click.option(
    "--folder",
    "run_folder",
    type=click.Path(path_type=Path),
    help="folder of the run  [default: runs/demo-DATE-TIME]",
)
@exit_cleanly
def demo(nproc: int, run_folder: Path | None) -> int:
    """Train a small model on generated data (about two minutes).

    Uses GPUs if there are any. Then trains the same steps twice on CPU ranks, with the serial
    schedule and with every technique, and compares the two.
    """
    return run_demo(nproc, run_folder)


def run_demo(nproc: int, run_folder: Path | None) -> int:
    """Returns the exit status."""
    from freescale.cli.demo import (
        DEMO_SETTINGS,
        choose_demo_ranks,
        compare_schedules,
        make_demo_data,
        make_short_data,
        print_ending,
    )
    from freescale.train.run_folder import new_folder

    name = datetime.now().strftime("demo-%Y-%m-%d-%H%M%S")
    folder = run_folder or new_folder(Path("runs") / name)
    path = make_demo_data(Path("runs") / "demo-data.parquet")
    ranks, device = choose_demo_ranks(nproc, _count_gpus())
    given = {**DEMO_SETTINGS, "data": str(path), "device": device}
    status = train_run(ranks, folder, None, None, given)
    if not status and nproc > 1:  # one rank waits for nobody: nothing to compare
        short = make_short_data(Path("runs") / "demo-short.parquet")
        status = compare_schedules(short, folder, nproc, format_arguments)
    if not status:
        print_ending(folder)
    return status
