"""The command `bench`: that of the distribution freescale-bench, or how to install it."""

from __future__ import annotations

from importlib.metadata import entry_points

import click

from freescale.cli.errors import exit_cleanly

COMMANDS = "freescale.commands"  # the group of entry points


def find_bench() -> click.Command:
    """The installed benchmarks, which are imported here, or a command that says how to get them."""
    for point in entry_points(group=COMMANDS, name="bench"):
        found: click.Command = point.load()
        return found
    return missing_bench


@click.command("bench", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@exit_cleanly
def missing_bench(arguments: tuple[str, ...]) -> int:
    """Run the benchmarks on this machine."""
    raise ValueError(
        "the benchmarks are a package of their own: in a clone of the repository, "
        "`pip install ./benchmarks`"
    )
