"""The command generate."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.options import add_settings, select_given
from freescale.cli.progress import show_progress
from freescale.config import GenerateConfig


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@add_settings(GenerateConfig)
@exit_cleanly
def generate(path: Path, **given: Any) -> None:
    """Generate histories with the statistics of production data.

    Lengths are heavy-tailed, some items are popular, and --collision sets the collision rate.
    """
    from freescale.data import synthetic

    config = GenerateConfig(**select_given(given))
    options = asdict(config) | {"labels": config.label_names, "actions": bool(config.label_names)}
    with show_progress() as progress:
        report = synthetic.generate(path, progress=progress, **options)
    rate = report.measured_collision
    collisions = "" if rate is None else f", {rate:.1%} collisions"
    click.echo(
        f"{report.path}: {report.users:,} users, {report.tokens:,} events, lengths "
        f"{report.lengths}{collisions}"
    )
