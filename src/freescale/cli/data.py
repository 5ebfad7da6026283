"""The commands generate and inspect."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from freescale.cli.bench import run_benchmarks
from freescale.cli.errors import exit_cleanly
from freescale.cli.layout import DataCommand
from freescale.cli.options import PATH, add_settings, format_arguments, select_given
from freescale.cli.runs import prepare_data, show_progress
from freescale.config import DataConfig, GenerateConfig, ModelConfig, RunConfig, TrainConfig


@click.command()
@click.argument("path", type=PATH)
@add_settings(GenerateConfig)
@exit_cleanly
def generate(path: Path, **given: Any) -> int:
    """Generate histories with the statistics of production data.

    Lengths are heavy-tailed, some items are popular, and --collision sets the collision rate.
    """
    config = GenerateConfig(**select_given(given))
    if given.pop("like") is not None:  # the benchmarks check the other options
        return run_benchmarks("dlrm", "generate", str(path), *format_arguments(given))
    from freescale.data.synthetic import generate as synthetic

    options = asdict(config)
    del options["like"], options["hot_album"]
    options |= {"labels": config.label_names, "actions": bool(config.label_names)}
    with show_progress() as progress:
        report = synthetic.generate(path, progress=progress, **options)
    rate = report.measured_collision
    collisions = "" if rate is None else f", {rate:.1%} collisions"
    click.echo(
        f"wrote {report.path}: {report.users:,} users, {report.tokens:,} events, histories of "
        f"{report.lengths['p50']:,} events (median) to {report.lengths['max']:,}{collisions}"
    )
    return 0


_BLOCKS = str.maketrans(dict.fromkeys("\u2588\u2589\u258a\u258b\u258c\u258d\u258e\u258f", "#"))


def _spell(line: str) -> str:
    """The line in characters that the terminal can print."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        line.encode(encoding)
    except UnicodeEncodeError:
        return line.translate(_BLOCKS).encode(encoding, "replace").decode(encoding)
    return line


_INSPECTED = ("format", "columns", "missing", "cache", "num_items", "max_length")
_FEATURES = ("items", "users", "features", "schema")


@click.command(cls=DataCommand)
@click.argument("data")
@add_settings(
    DataConfig, ModelConfig, TrainConfig, only=(*_INSPECTED, *_FEATURES, "labels", "global_batch")
)
@click.option(
    "--write-schema", type=PATH, help="write the features into a file, for --schema of train"
)
@exit_cleanly
def inspect(data: str, write_schema: Path | None, **given: Any) -> None:
    """Show what a data file holds, before training on it.

    Shows how columns are read, users, items, lengths, collisions, and which columns become
    features, and ends with the command to train on it.
    """
    from freescale.config.features import write_schema as spell_schema
    from freescale.data.inspection import describe_inspection, inspect_features, inspect_histories
    from freescale.train.build import find_cache

    ranking = {"task": "ranking"} if given["labels"] else {}
    config = RunConfig.from_settings({"data": data, **given, **ranking})
    path = prepare_data(config)
    found = inspect_histories(
        path,
        config.train.global_batch,
        config.data.max_length,
        config.data.num_items,
        config.label_names,
    )
    for line in describe_inspection(found):
        click.echo(_spell(line))
    lines, features, notes = inspect_features(config.data, find_cache(config.data))
    for line in lines:
        click.echo(_spell(line))
    if write_schema is not None:
        write_schema.write_text(spell_schema(features, notes), encoding="utf-8")
        click.echo(f"wrote {write_schema}: {len(features)} features")
        given |= {"schema": str(write_schema), "features": None}
    split = {} if found.leaves_one_out else {"split": "none"}
    arguments = format_arguments({"data": data, **ranking, **split, **select_given(given)})
    click.echo(f"train on it: freescale train {shlex.join(arguments)}")
