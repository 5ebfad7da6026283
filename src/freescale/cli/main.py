"""The command line. Heavy imports happen inside the commands, so that --help answers at once."""

from __future__ import annotations

import click

from freescale import __version__
from freescale.cli.bench import bench
from freescale.cli.data import generate, inspect
from freescale.cli.demo import demo
from freescale.cli.doctor import doctor
from freescale.cli.finished import checkpoints, compare, evaluate, export, report
from freescale.cli.layout import CommandGroup
from freescale.cli.recommend import recommend, serve
from freescale.cli.simulate import simulate
from freescale.cli.train import train


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__)
def main() -> None:
    """Train sequence recommenders across many GPUs without stalling on stragglers or embedding
    communication."""


# In the order in which people need them.
main.add_section("Get started", doctor, demo)
main.add_section("Train a model", inspect, train, evaluate, checkpoints, report, compare)
main.add_section("Use a model", recommend, serve, export)
main.add_section("Generate, plan and measure", generate, simulate, bench)
