"""The command line. Heavy imports happen inside the commands, so that --help answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from freescale import __version__
from freescale.cli.bench import bench
from freescale.cli.errors import guarded
from freescale.cli.measure import report
from freescale.config import (
    DataConfig,
    GenerateConfig,
    ModelConfig,
    RunConfig,
    SimulateConfig,
    TrainConfig,
)
from freescale.folders import cache_folder

_PARTS = {"data": DataConfig, "model": ModelConfig, "train": TrainConfig}
_TYPES = {"int": int, "float": float, "str": str, "bool": bool}


def _config_options(function: Callable, kinds: Iterable[Any] = tuple(_PARTS.values())) -> Callable:
    """One option per setting of config.py, defaults and help included."""
    for kind in reversed(list(kinds)):
        for entry in reversed(fields(kind)):
            base = str(entry.type).removesuffix(" | None")
            flag = entry.name.replace("_", "-")
            name = f"--{flag}/--no-{flag}" if base == "bool" else f"--{flag}"
            choices = entry.metadata.get("choices")
            function = click.option(
                name,
                entry.name,
                type=None if base == "bool" else click.Choice(choices) if choices else _TYPES[base],
                default=None,
                help=_help(entry),
            )(function)
    return function


def _help(entry: Any) -> str:
    text = entry.metadata["help"]
    default = entry.default if entry.default is not MISSING else None
    return text if default in (None, "") else f"{text}  [default: {default}]"


def _configured(given: dict[str, Any], base: RunConfig | None = None) -> RunConfig:
    """The configuration: what was given on the command line, over `base` (a run's config.json),
    over the defaults."""
    parts = {}
    for part, kind in _PARTS.items():
        names = [entry.name for entry in fields(kind)]
        values = {name: getattr(getattr(base, part), name) for name in names} if base else {}
        values |= {name: given[name] for name in names if given.get(name) is not None}
        parts[part] = kind(**values)
    return RunConfig(**parts)


def _is_rank() -> bool:
    """Whether torchrun, Slurm through it, or our own launcher started this process as one of
    several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _prepared(config: RunConfig) -> Path:
    """The histories file of the data, made if need be: by one process of a machine, the others wait
    for it."""
    from freescale.data.prepare import prepare

    cache = Path(config.data.cache) if config.data.cache else cache_folder()
    with _shown_progress() as progress:
        return prepare(config.data.data, cache, config.data.format, config.data.num_items, progress)


@contextmanager
def _shown_progress() -> Iterator[Callable[[str, float], None] | None]:
    """A progress bar for long work on files, where a person is looking."""
    if not sys.stdout.isatty() or os.environ.get("RANK", "0") != "0":
        yield None
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, share: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=1.0)
            bar.update(tasks[stage], completed=share)

        yield show


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__)
def main() -> None:
    """Distributed training of sequence recommendation models with minimal scaling cost."""


main.add_command(bench)
main.add_command(report)


@main.command()
@_config_options
@click.option(
    "--nproc",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="ranks to start on this machine",
)
@click.option(
    "--folder",
    "run_folder",
    type=click.Path(path_type=Path),
    help=("folder of the run  [default: runs/DATE-TIME]"),
)
@click.option(
    "--resume", is_flag=True, help=("go on from the run's last checkpoint (--folder names it)")
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=("port where local ranks meet  [default: a free one]"),
)
def train(
    nproc: int, run_folder: Path | None, resume: bool, port: int | None, **given: Any
) -> None:
    """Train a model on histories.

    Starts its own local ranks (--nproc), or joins those that torchrun started.
    """
    guarded(lambda: _train(nproc, run_folder, resume, port, given))


def _train(
    nproc: int, run_folder: Path | None, resume: bool, port: int | None, given: dict[str, Any]
) -> int:
    base = None
    if resume:
        if run_folder is None or not (run_folder / "config.json").exists():
            raise ValueError(
                f"--resume needs --folder with the folder of an earlier run, not {run_folder}"
            )
        base = RunConfig.from_json((run_folder / "config.json").read_text(encoding="utf-8"))
    config = _configured(given, base)
    if not _is_rank():
        if nproc > 1:
            _refuse_missing_gpus(config.train.device, nproc)
        _prepared(config)
        if nproc > 1:
            from freescale.train.launch import launch

            # else rank 0 finds a name that is free
            where = ["--folder", str(run_folder)] if run_folder else []
            return launch(
                ["train", *_as_arguments(given), *where, *(["--resume"] if resume else [])],
                nproc,
                port,
            )
    from freescale.train.run import run_training

    return run_training(config, run_folder, resume, lambda: _prepared(config))


def _refuse_missing_gpus(device: str, nproc: int) -> None:
    if device == "cpu":
        return
    from freescale.transport.connect import choose_device

    choose_device(device, 0, nproc)


def _as_arguments(given: dict[str, Any]) -> list[str]:
    arguments: list[str] = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            arguments += [f"--{flag}", str(value)]
    return arguments


@main.command("eval")
@click.argument("run_folder", type=click.Path(path_type=Path))
@click.option("--data", help="another data file than the run's own")
@click.option(
    "--device",
    type=click.Choice(("auto", "cpu", "cuda")),
    help=("another device than the run's own"),
)
@click.option(
    "--part",
    type=click.Choice(("validation", "test")),
    default="test",
    show_default=True,
    help="part of the split",
)
@click.option(
    "--nproc",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="ranks to start on this machine",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=("port where local ranks meet  [default: a free one]"),
)
def evaluate(
    run_folder: Path, data: str | None, device: str | None, part: str, nproc: int, port: int | None
) -> None:
    """Evaluate a run's last checkpoint over the full catalogue, with the popularity baseline beside
    it."""
    guarded(lambda: _evaluate(run_folder, {"data": data, "device": device}, part, nproc, port))


def _evaluate(
    run_folder: Path, given: dict[str, Any], part: str, nproc: int, port: int | None
) -> int:
    if not (run_folder / "config.json").exists():
        raise ValueError(f"{run_folder} is not the folder of a run: it has no config.json")
    config = RunConfig.from_json((run_folder / "config.json").read_text(encoding="utf-8"))
    config = _configured(given, config)
    if not _is_rank():
        _prepared(config)
        if nproc > 1:
            from freescale.train.launch import launch

            arguments = ["eval", str(run_folder), "--part", part, *_as_arguments(given)]
            return launch(arguments, nproc, port)
    from freescale.train.run import run_evaluation

    run_evaluation(config, run_folder, part, lambda: _prepared(config))
    return 0


@main.command()
@click.option("--nproc", type=click.IntRange(1), default=2, show_default=True, help="ranks")
@click.option(
    "--folder",
    "run_folder",
    type=click.Path(path_type=Path),
    help=("folder of the run  [default: runs/demo-DATE-TIME]"),
)
def demo(nproc: int, run_folder: Path | None) -> None:
    """Train a small model on generated histories, show where the time went, and compare serial with
    all techniques."""
    guarded(lambda: _demo(nproc, run_folder))


def _demo(nproc: int, run_folder: Path | None) -> int:
    from freescale.train.demo import DEMO_SETTINGS, compare, demo_data, short_data
    from freescale.train.run_folder import new_folder

    folder = run_folder or new_folder(
        Path("runs") / datetime.now().strftime("demo-%Y-%m-%d-%H%M%S")
    )
    path = demo_data(Path("runs") / "demo-data.parquet")
    status = _train(nproc, folder, False, None, {**DEMO_SETTINGS, "data": str(path)})
    if status or nproc == 1:  # one rank waits for nobody: nothing to compare
        return status
    return compare(short_data(Path("runs") / "demo-short.parquet"), folder, nproc, _as_arguments)


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@partial(_config_options, kinds=(GenerateConfig,))
def generate(path: Path, **given: Any) -> None:
    """Write production-like histories: heavy-tailed lengths, popular items, a chosen collision
    rate."""

    def action() -> None:
        from freescale.data.synthetic import generate as write

        config = GenerateConfig(
            **{name: value for name, value in given.items() if value is not None}
        )
        options = asdict(config) | {
            "labels": config.label_names,
            "actions": bool(config.label_names),
        }
        with _shown_progress() as progress:
            report = write(path, progress=progress, **options)
        met = (
            ""
            if report.measured_collision is None
            else (f", {report.measured_collision:.1%} collisions")
        )
        click.echo(
            f"{report.path}: {report.users:,} users, {report.tokens:,} events, lengths "
            f"{report.lengths}{met}"
        )

    guarded(action)


@main.command()
@click.argument("run_folder", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="folder for the safetensors files"
)
def export(run_folder: Path, out: Path) -> None:
    """Write a run's last checkpoint as safetensors: dense weights, and each table whole in the
    order of its ids."""

    def action() -> None:
        from freescale.train.export import export_run

        for path in export_run(run_folder, out):
            click.echo(path)

    guarded(action)


@main.group(invoke_without_command=True)
@click.option(
    "--gpus",
    multiple=True,
    type=click.IntRange(1),
    default=(256,),
    show_default=True,
    help="GPUs; may be given several times",
)
@partial(_config_options, kinds=(SimulateConfig,))
@click.pass_context
def simulate(context: click.Context, gpus: tuple[int, ...], **given: Any) -> None:
    """What a step would take on a cluster, where its time would go, and what each technique would
    give."""
    if context.invoked_subcommand is not None:
        return

    def action() -> None:
        from freescale.simulate.show import show

        show(
            SimulateConfig(**{name: value for name, value in given.items() if value is not None}),
            gpus,
        )

    guarded(action)


@simulate.command()
@click.option(
    "--device",
    type=click.Choice(("cuda", "cpu")),
    default="cuda",
    show_default=True,
    help="what to measure",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help=("file to write; its name is the calibration's"),
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="WIDTH:HEADS",
    help=("model shapes  [default: 512:4, 256:4, 128:2; cpu 64:2]"),
)
@click.option(
    "--repetitions",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="of each measurement",
)
def calibrate(device: str, out: Path, shapes: tuple[str, ...], repetitions: int) -> None:
    """Measure the compute curve of this machine: forward, backward, rows and optimizer over
    lengths, batch and width."""

    def action() -> None:
        from freescale.simulate.show import calibrated

        calibrated(device, out, shapes, repetitions)

    guarded(action)


@main.command()
def doctor() -> None:
    """Show what this machine has (torch, devices, backends, RDMA, UCX, Triton) and what would
    run."""

    def action() -> None:
        from rich.console import Console
        from rich.table import Table

        from freescale.cli.doctor import examine

        table = Table("what", "found", "what follows")
        for row in examine():
            table.add_row(*row)
        Console().print(table)

    guarded(action)
