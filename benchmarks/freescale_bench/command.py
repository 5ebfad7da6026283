"""The command `freescale bench`, an entry point of freescale (pyproject.toml). Each benchmark is a
subcommand, which parses its own options and is imported only when it runs."""

from __future__ import annotations

from importlib import import_module

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.layout import CommandGroup
from freescale_bench import BENCHMARKS

_OTHERS = {
    "all": "Run every benchmark that this machine supports, one after another; --list shows them.",
    "figures": "Draw the documentation's figures and tables from results; needs the repository.",
}


@click.group(cls=CommandGroup)
def bench() -> None:
    """Run the benchmarks on this machine."""


def _add(name: str, text: str, module: str) -> None:
    # The benchmark parses everything after its name, including --help.
    @bench.command(
        name, help=text, context_settings={"ignore_unknown_options": True, "help_option_names": []}
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    @exit_cleanly
    def run(arguments: tuple[str, ...]) -> int:
        return int(import_module(module).main(arguments))


for _name, _text in _OTHERS.items():
    _add(_name, _text, f"freescale_bench.{_name}")
for _name, _text in BENCHMARKS.items():
    _add(_name, _text, f"freescale_bench.{_name}.__main__")
