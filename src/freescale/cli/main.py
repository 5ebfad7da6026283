"""The command line. Heavy imports happen inside the commands, so that --help answers at once."""

from __future__ import annotations

from importlib.metadata import entry_points

import click

from freescale import __version__
from freescale.cli.checkpoints import checkpoints
from freescale.cli.compare import compare
from freescale.cli.data import generate, inspect
from freescale.cli.demo import demo
from freescale.cli.doctor import doctor
from freescale.cli.errors import exit_cleanly
from freescale.cli.evaluate import evaluate, export, report
from freescale.cli.layout import CommandGroup
from freescale.cli.recommend import recommend
from freescale.cli.serve import serve
from freescale.cli.simulate import simulate
from freescale.cli.train import train

COMMANDS = "freescale.commands"  # the group of entry points


# The installed command reads all arguments, also --help.
@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@exit_cleanly
def bench(arguments: tuple[str, ...]) -> int:
    """Run the benchmarks on this machine."""
    for point in entry_points(group=COMMANDS, name="bench"):
        installed: click.Command = point.load()
        return int(installed.main(list(arguments), "freescale bench") or 0)
    raise ValueError(
        "the benchmarks are a distribution of their own: in a clone of the repository, "
        "`pip install -e ./benchmarks`"
    )


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
