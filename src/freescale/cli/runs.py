"""What commands around a run share: options, its configuration, progress bars."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from freescale.cli.layout import grouped_option
from freescale.config import RunConfig

DISTRIBUTION = "Distribution"  # a heading

add_nproc = grouped_option(
    "--nproc",
    heading=DISTRIBUTION,
    common=True,
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="ranks (processes) to start on this machine: as many as it has GPUs",
)
add_port = grouped_option(
    "--port",
    heading=DISTRIBUTION,
    type=click.IntRange(1, 65535),
    help="port where local ranks meet  [default: a free one]",
)


def read_config(run_folder: Path) -> RunConfig:
    """Reads the settings of a run. ValueError if the folder holds none."""
    path = run_folder / "config.json"
    if not run_folder.is_dir():
        raise ValueError(f"{run_folder} is not the folder of a run: there is no such folder")
    if not path.exists():
        raise ValueError(f"{run_folder} is not the folder of a run: it has no config.json")
    return RunConfig.read(run_folder)


def refuse_missing_data(config: RunConfig, run_folder: Path) -> None:
    """Raises ValueError if the data of config.json does not exist. Most often the run was started
    in another folder."""
    data = config.data.data
    if "://" not in data and not glob.glob(data):
        raise ValueError(
            f"{data}: no such file, seen from {Path.cwd()}; {run_folder / 'config.json'} names it "
            "so: pass --data with its path, or run the command where the run was started"
        )


@contextmanager
def show_progress() -> Iterator[Callable[[str, float], None] | None]:
    """Yields a function of (stage, share done), on a terminal and on rank 0; elsewhere None."""
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


def prepare_data(config: RunConfig, run: Path | None = None, other: str | None = None) -> Path:
    """Returns the histories file of the data, and makes the event store of a run in order of time.
    One process of a machine makes them; the others wait. `run`, `other`: of a run that follows a
    source, as of `prepare_followed`."""
    from freescale.train.build import find_cache, prepare_data
    from freescale.train.follow import prepare_followed
    from freescale.train.time_order import prepare_windows

    if run is not None and config.data.follow is not None:
        return prepare_followed(config, run, other)
    with show_progress() as progress:
        path = prepare_data(config, progress)
        if config.data.order == "time":
            prepare_windows(config, path, find_cache(config.data), progress)
        return path
