"""The command checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.options import PATH
from freescale.stores.runs import find_checkpoints, open_run

if TYPE_CHECKING:  # imports torch
    from freescale.train.state.overview import Entry


@click.command()
@click.argument("run_folder", metavar="RUN", type=PATH)
@click.option("--verify", is_flag=True, help="read all files and compare their checksums")
@click.option(
    "--compact",
    is_flag=True,
    help="make the last checkpoint a full one, and remove the deltas that led to it",
)
@exit_cleanly
def checkpoints(run_folder: Path, verify: bool, compact: bool) -> int:
    """List, verify and compact a run's checkpoints.

    A full checkpoint stands for itself; a delta (--full-every) holds what changed since another
    one, and needs it.
    """
    from freescale.train.run_folder import lock_folder
    from freescale.train.state.overview import compact_last, list_checkpoints
    from freescale.train.state.stored import open_folder

    run_folder = open_run(run_folder)
    folder = find_checkpoints(run_folder)
    if not open_folder(folder).steps():
        raise ValueError(f"{run_folder} holds no checkpoint: name the folder of a run")
    if compact:
        with lock_folder(run_folder) or nullcontext():  # some file systems have no locks
            path, removed = compact_last(folder)
        without = f"; removed {', '.join(map(str, removed))}" if removed else ""
        click.echo(f"{path} is a full checkpoint{without}")
    entries = list(list_checkpoints(folder, verify))
    for line in _format(entries):
        click.echo(line)
    damaged = [entry for entry in entries if entry.problem]
    for entry in damaged:
        click.echo(entry.problem, err=True)
    if verify and not damaged:
        click.echo("all files are as they were written")
    return 1 if damaged else 0


def _format(entries: list[Entry]) -> list[str]:
    from datetime import datetime

    rows = [("step", "kind", "size", "ranks", "saved", "")]
    for entry in entries:
        kind = "full" if entry.parent is None else f"delta since {entry.parent}"
        notes = ["best"] * entry.best + ["DAMAGED"] * bool(entry.problem)
        saved = datetime.fromtimestamp(entry.saved).strftime("%Y-%m-%d %H:%M:%S")
        size, ranks = _format_bytes(entry.bytes), str(entry.ranks or "?")
        rows.append((str(entry.step), kind, size, ranks, saved, ", ".join(notes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    specs = [f"{side}{width}" for side, width in zip("><>><<", widths, strict=True)]
    lines = ["  ".join(map(format, row, specs)).rstrip() for row in rows]
    total = _format_bytes(sum(entry.bytes for entry in entries))
    return [*lines, f"{len(entries)} in all, {total}"]


def _format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
