"""What commands around a run share: options, and its configuration."""

from __future__ import annotations

import glob
from pathlib import Path

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
