"""`freescale compare`: settings that differ between runs, and their quality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.options import PATH


@click.command()
@click.argument("run_folders", type=PATH, nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of a table")
@exit_cleanly
def compare(run_folders: tuple[Path, ...], as_json: bool) -> int:
    """Compare the settings and the quality of runs.

    Prints the settings that differ, the steps made, and the last metrics of the validation and the
    test part. `freescale report RUN RUN` draws the curves.
    """
    from freescale.report.runs import read_runs

    runs = read_runs(list(run_folders))
    columns = {run.name: describe(run.config, run.metrics) for run in runs}
    rows = find_differences(columns)
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("", *columns)
    for name, values in rows.items():
        table.add_row(name, *("" if v is None else _format(v) for v in values.values()))
    Console().print(table)
    return 0


def describe(config: dict[str, Any], metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Settings of a run by group and name, its last step, and its last metrics by part."""
    found: dict[str, Any] = {
        f"{group}.{name}": value
        for group, settings in config.items()
        if isinstance(settings, dict)
        for name, value in settings.items()
    }
    for entry in metrics:
        found["steps"] = entry["step"]
        for part in ("validation", "test"):
            for name, value in entry.get(part, {}).get("model", {}).items():
                found[f"{part} {name}"] = value
    return found


def find_differences(columns: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of a table: settings that differ, and every figure. None: a run has none."""
    names = dict.fromkeys(name for found in columns.values() for name in found)
    rows = {n: {run: found.get(n) for run, found in columns.items()} for n in names}
    return {
        name: values
        for name, values in rows.items()
        if "." not in name.split(" ")[0] or len(set(map(repr, values.values()))) > 1
    }


def _format(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) and abs(value) < 1000 else str(value)
