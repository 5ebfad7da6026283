"""The command `freescale bench`: one subcommand for each benchmark, which reads its own options and
is imported when it runs. pyproject.toml names it as an entry point of freescale."""

from __future__ import annotations

from importlib import import_module

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.layout import CommandGroup
from freescale_bench import BENCHMARKS

_OTHERS = {
    "all": "Run every benchmark that this machine can, one after another; --list shows them.",
    "figures": "Draw figures and tables of the documents from the results; needs the repository.",
}


@click.group(cls=CommandGroup)
def bench() -> None:
    """Run the benchmarks on this machine."""


def _add(name: str, text: str, module: str) -> None:
    # The words after the name, --help among them, are the benchmark's to read.
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
