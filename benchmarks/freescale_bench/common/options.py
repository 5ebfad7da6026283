"""The command line of a benchmark: `freescale bench NAME` and `python -m freescale_bench.NAME` read
the same words. Imports no torch, so that --help answers at once, and no click, which a GPU machine
may lack."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from freescale_bench.common.results import Destination


def make_parser(
    name: str, description: str | None, *, kept: bool = True
) -> argparse.ArgumentParser:
    """The parser of benchmark `name`. `kept`: it writes a result, and has --folder and --commit."""
    parser = argparse.ArgumentParser(
        prog=f"freescale bench {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if kept:
        parser.add_argument(
            "--folder",
            type=Path,
            help="for the result (default: benchmarks/results in a clone, else ./results)",
        )
        parser.add_argument(
            "--commit", help="of the tree that is measured, where it was copied without its history"
        )
    return parser


def add_turns(parser: argparse.ArgumentParser, each: int, ranks: str = "cuda: ") -> None:
    """How ranks take turns: as many of `each` steps of every arm, or a trial."""
    parser.add_argument("--nproc", type=int, default=4, help="cuda: ranks")
    parser.add_argument("--turns", type=int, default=8, help=f"{ranks}turns of every arm")
    parser.add_argument("--each", type=int, default=each, help=f"{ranks}steps of a turn")
    about = "tiny sizes on CPU ranks, to try the code; keeps no results"
    parser.add_argument("--trial", action="store_true", help=f"{ranks}{about}")


def read_destination(options: argparse.Namespace) -> Destination:
    return Destination(options.folder, options.commit)


def run_command(main: Callable[[], int]) -> NoReturn:
    """Runs `main` as the command of a process: an error that a user can mend is one line, and the
    exit status is never 0 after one."""
    try:
        status = main()
    except (ValueError, OSError) as error:
        # The same words on every rank, so that the launcher can say them once.
        print(f"freescale: error: {error}", file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        # A failed rank must not wait for its peers when its process groups are destroyed.
        os._exit(status)
    sys.exit(status)
