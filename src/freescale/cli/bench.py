"""The command bench, and others that need the benchmarks, which are a distribution of their own."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import click

from freescale.cli.errors import exit_cleanly

COMMANDS = "freescale.commands"  # the group of entry points
# For commands that pass on all arguments, also --help.
FORWARDED: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": []}


def run_benchmarks(*arguments: str) -> int:
    """Runs `freescale bench ARGUMENTS`. ValueError without the benchmarks."""
    for point in entry_points(group=COMMANDS, name="bench"):
        installed: click.Command = point.load()
        return int(installed.main(list(arguments), "freescale bench") or 0)
    raise ValueError(
        "the benchmarks are a distribution of their own: in a clone of the repository, "
        "`pip install -e ./benchmarks`"
    )


@click.command(context_settings=FORWARDED)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@exit_cleanly
def bench(arguments: tuple[str, ...]) -> int:
    """Run the benchmarks on this machine."""
    return run_benchmarks(*arguments)
