"""The commands around a run: train, eval, export and demo."""

from __future__ import annotations

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
from freescale.train.launch import is_rank

RUN = "Ranks and run folder"

_nproc = click.option(
    "--nproc",
    cls=GroupedOption,
    heading=RUN,
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="ranks to start on this machine",
)
_port = click.option(
    "--port",
    cls=GroupedOption,
    heading=RUN,
    type=click.IntRange(1, 65535),
    help="port where local ranks meet  [default: a free one]",
)


@click.command(cls=GroupedCommand)
@add_settings(DataConfig, ModelConfig, TrainConfig)
@_nproc
@click.option(
    "--folder",
    "run_folder",
    cls=GroupedOption,
    heading=RUN,
    type=click.Path(path_type=Path),
    help="folder of the run  [default: runs/DATE-TIME]",
)
@click.option(
    "--resume",
    cls=GroupedOption,
    heading=RUN,
    is_flag=False,
    flag_value="last",
    metavar="[CHECKPOINT]",
    help=(
        "go on from a checkpoint of the run (--folder names it): the last, or `best`, or a step; "
        "later ones are given up"
    ),
)
@_port
@exit_cleanly
def train(
    nproc: int, run_folder: Path | None, resume: str | None, port: int | None, **given: Any
) -> int:
    """Train a model on histories or interactions, on one rank or many.

    Starts its own local ranks (--nproc), or joins those that torchrun started.
    """
    if given.get("recipe") == "list":
        return show_recipes()
    return train_run(nproc, run_folder, resume, port, given)


def show_recipes() -> int:
    """Prints the recipes of the package, a line each."""
    found = list_recipes()
    width = max(len(recipe.name) for recipe in found)
    for recipe in found:
        click.echo(f"{recipe.name:{width}}  {recipe.description}")
    return 0


def train_run(
    nproc: int, run_folder: Path | None, resume: str | None, port: int | None, given: dict[str, Any]
) -> int:
    """Trains as one rank, or starts `nproc` of them.

    Args:
        nproc: ranks to start.
        run_folder: of the run; None makes a new one.
        resume: the checkpoint of the folder to go on from; None for a new run.
        port: where the ranks meet.
        given: settings that were given.

    Returns:
        The exit status.
    """
    base = None
    if resume is not None:
        if run_folder is None or not (run_folder / "config.json").exists():
            raise ValueError(
                f"--resume needs --folder with the folder of an earlier run, not {run_folder}"
            )
        base = _read_config(run_folder)
    config = RunConfig.from_settings(given, base)
    if not is_rank():
        if nproc > 1:
            _refuse_missing_gpus(config.train.device, nproc)
        _prepare(config)
        if nproc > 1:
            from freescale.train.launch import launch

            # without a folder, rank 0 finds a name that is free
            where = ["--folder", str(run_folder)] if run_folder else []
            arguments = ["train", *format_arguments(given), *where]
            return launch([*arguments, *(["--resume", resume] if resume else [])], nproc, port)
    from freescale.train.run import run_training

    return run_training(config, run_folder, resume, lambda: _prepare(config))


def _read_config(run_folder: Path) -> RunConfig:
    return RunConfig.from_json((run_folder / "config.json").read_text(encoding="utf-8"))


def _refuse_missing_gpus(device: str, nproc: int) -> None:
    if device == "cpu":
        return
    from freescale.transport.connect import choose_device

    choose_device(device, 0, nproc)


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
    help="CSV file for the rank of every user's target (retrieval)",
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
    """Evaluate a run's checkpoint on the full catalogue, beside the popularity baseline."""
    if not (run_folder / "config.json").exists():
        raise ValueError(f"{run_folder} is not the folder of a run: it has no config.json")
    given = {"data": data, "device": device}
    config = RunConfig.from_settings(given, _read_config(run_folder))
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
            from freescale.train.launch import launch

            options = format_arguments({**given, "checkpoint": checkpoint, "ranks": ranks})
            arguments = ["eval", str(run_folder), "--part", part, *options]
            return launch(arguments, nproc, port)
    from freescale.train.run import run_evaluation

    run_evaluation(config, run_folder, part, lambda: _prepare(config), checkpoint, ranks)
    return 0


@click.command()
@click.argument("run_folder", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="folder for the safetensors files"
)
@_checkpoint
@exit_cleanly
def export(run_folder: Path, out: Path, checkpoint: str | None) -> None:
    """Write a run's checkpoint as safetensors files, for serving.

    Dense weights are one file; each table is a file of its own, with its rows in the order of ids.
    Where ids of the data were numbered anew, vocabulary.parquet says which id has which row.
    """
    from freescale.train.export import export_run

    for path in export_run(run_folder, out, checkpoint):
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
    """Train a small model on generated histories and compare the serial schedule with the full
    system."""
    return run_demo(nproc, run_folder)


def run_demo(nproc: int, run_folder: Path | None) -> int:
    """Returns the exit status."""
    from freescale.train.demo import (
        DEMO_SETTINGS,
        compare_schedules,
        make_demo_data,
        make_short_data,
    )
    from freescale.train.run_folder import new_folder

    name = datetime.now().strftime("demo-%Y-%m-%d-%H%M%S")
    folder = run_folder or new_folder(Path("runs") / name)
    path = make_demo_data(Path("runs") / "demo-data.parquet")
    status = train_run(nproc, folder, None, None, {**DEMO_SETTINGS, "data": str(path)})
    if status or nproc == 1:  # one rank waits for nobody: nothing to compare
        return status
    short = make_short_data(Path("runs") / "demo-short.parquet")
    return compare_schedules(short, folder, nproc, format_arguments)
