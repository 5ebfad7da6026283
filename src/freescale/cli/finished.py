"""The commands on finished runs: eval, export, report, compare and checkpoints."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.options import PATH, format_arguments
from freescale.cli.runs import add_nproc, add_port, prepare_data, read_config, refuse_missing_data
from freescale.config import RunConfig
from freescale.launch.ranks import is_rank, launch
from freescale.stores.runs import find_checkpoints, open_run

if TYPE_CHECKING:  # imports torch
    from freescale.train.state.overview import Entry

add_checkpoint = click.option(
    "--checkpoint",
    help="last, best or a step  [default: the best of a run with --keep best, else the last]",
)


@click.command("eval")
@click.argument("run_folder", type=PATH)
@add_checkpoint
@click.option("--data", help="another data file than the run's own")
@click.option(
    "--device", type=click.Choice(("auto", "cpu", "cuda")), help="another device than the run's own"
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
    type=PATH,
    help="CSV file for the rank of every user's target, with the ids of the data (retrieval)",
)
@add_nproc
@add_port
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

    Ranks every target among all items of the catalogue, and also evaluates the popularity
    baseline. Ranking tasks are evaluated by NE, AUC and GAUC. All metrics are written to
    eval-PART.json in the run's folder, those of other data to eval-PART-DIGEST.json.

    Of a run with --follow, the window after that of the checkpoint is evaluated, or the last one of
    --data, whose events are read as those of the run.
    """
    run_folder = open_run(run_folder)
    given, config = {"data": data, "device": device}, read_config(run_folder)
    follows = config.data.follow is not None
    config = RunConfig.from_settings({**given, "data": None if follows else data}, config)
    if data is None and not follows:
        refuse_missing_data(config, run_folder)
    if not is_rank():
        try:
            prepare_data(config, run_folder, data)
        except ValueError as error:
            if data is not None or "no such file" not in str(error):
                raise
            raise ValueError(
                f"{error}; the run was started in another folder, or its data has moved: say "
                "where it is with --data"
            ) from None
        if nproc > 1:
            options = format_arguments({**given, "checkpoint": checkpoint, "ranks": ranks})
            arguments = ["eval", str(run_folder), "--part", part, *options]
            return launch(arguments, nproc, port)
    from freescale.train.commands import run_evaluation

    def prepare() -> Path:
        return prepare_data(config, run_folder, data)

    run_evaluation(config, run_folder, part, prepare, checkpoint, ranks, data)
    return 0


@click.command()
@click.argument("run_folder", type=PATH)
@click.option("--out", type=PATH, required=True, help="folder for the safetensors files")
@click.option(
    "--for",
    "purpose",
    type=click.Choice(("python", "serving")),
    default="python",
    show_default=True,
    help="python: weights, for freescale.load; serving: also a program that needs only torch",
)
@click.option("--index", is_flag=True, help="also an index for approximate search (needs faiss)")
@click.option(
    "--min-recall",
    type=click.FloatRange(0, 1),
    default=0.95,
    show_default=True,
    help="share of the exact ten best items that --index finds, at least",
)
@click.option("--overwrite", is_flag=True, help="replace an export that --out holds")
@click.option("--data", help="where the run's data is, if it has moved")
@add_checkpoint
@exit_cleanly
def export(
    run_folder: Path,
    out: Path,
    purpose: str,
    index: bool,
    min_recall: float,
    overwrite: bool,
    data: str | None,
    checkpoint: str | None,
) -> None:
    """Write a run's model as a folder that describes itself.

    freescale.load and freescale serve need nothing else, neither the run nor its data.

    Dense weights are one safetensors file; each table is its own, with rows in the order of
    items.parquet, which has the original ids.

    --for serving adds the model as a program of torch.export (encoder.pt2), vectors and ids of the
    items, serving.json, which lists the inputs, a model card, and example.py, which scores a
    history without FreeScale.
    """
    from freescale.recommend.export import export_run

    serving, least = purpose == "serving", min_recall if index else None
    for path in export_run(run_folder, out, checkpoint, overwrite, data, serving, least):
        click.echo(path)
    if index:
        from freescale.recommend.approximate import ApproximateIndex

        about = ApproximateIndex.read(out).about
        click.echo(
            f"approximate search finds {about['recall@10']:.1%} of the exact ten best items of "
            f"{about['queries']:,} users"
        )


@click.command()
@click.argument("runs", type=PATH, nargs=-1, required=True, metavar="RUN [RUN ...]")
@click.option("--out", type=PATH, default="report.html", show_default=True, help="file to write")
@click.option("--open", "show", is_flag=True, help="show it in the browser")
@exit_cleanly
def report(runs: tuple[Path, ...], out: Path, show: bool) -> None:
    """Write an HTML page: where the time of one or more runs went.

    RUN is the folder of a run. Of several runs, the first is the one the others are compared with.
    """
    from freescale.report.page import render_page
    from freescale.report.runs import read_runs

    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.absolute().parent}, make it first")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file")
    out.write_text(render_page(read_runs([open_run(run) for run in runs])), encoding="utf-8")
    click.echo(f"wrote {out} ({out.stat().st_size / 1024:,.0f} KiB)")
    if show:
        import webbrowser

        webbrowser.open(out.absolute().as_uri())


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
    for line in _format_entries(entries):
        click.echo(line)
    damaged = [entry for entry in entries if entry.problem]
    for entry in damaged:
        click.echo(entry.problem, err=True)
    if verify and not damaged:
        click.echo("all files are as they were written")
    return 1 if damaged else 0


def _format_entries(entries: list[Entry]) -> list[str]:
    from datetime import datetime

    from rich.filesize import decimal

    rows = [("step", "kind", "size", "ranks", "saved", "")]
    for entry in entries:
        kind = "full" if entry.parent is None else f"delta since {entry.parent}"
        notes = ["best"] * entry.best + ["DAMAGED"] * bool(entry.problem)
        saved = datetime.fromtimestamp(entry.saved).strftime("%Y-%m-%d %H:%M:%S")
        size, ranks = decimal(entry.bytes), str(entry.ranks or "?")
        rows.append((str(entry.step), kind, size, ranks, saved, ", ".join(notes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    specs = [f"{side}{width}" for side, width in zip("><>><<", widths, strict=True)]
    lines = ["  ".join(map(format, row, specs)).rstrip() for row in rows]
    total = decimal(sum(entry.bytes for entry in entries))
    return [*lines, f"{len(entries)} in all, {total}"]


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
        table.add_row(name, *("" if v is None else _format_figure(v) for v in values.values()))
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


def _format_figure(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) and abs(value) < 1000 else str(value)
