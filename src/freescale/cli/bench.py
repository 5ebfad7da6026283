"""The command bench: runs that of the distribution freescale-bench, or explains how to install
it."""

from __future__ import annotations

from importlib.metadata import entry_points

import click

from freescale.cli.errors import exit_cleanly

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
