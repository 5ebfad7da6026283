"""The command line of a benchmark, for both `freescale bench NAME` and `python -m
freescale_bench.NAME`. Imports no torch, to keep --help fast, and no click, which a GPU machine may
lack."""

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
    """Makes the parser of benchmark `name`. `kept`: the benchmark writes a result, and has --folder
    and --commit."""
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
            "--commit", help="measured commit, for a tree copied without its history"
        )
    return parser


def add_turns(parser: argparse.ArgumentParser, each: int, ranks: str = "cuda: ") -> None:
    """Adds the options of ranks whose arms take turns. `each`: default steps per turn."""
    parser.add_argument("--nproc", type=int, default=4, help="cuda: ranks")
    parser.add_argument("--turns", type=int, default=8, help=f"{ranks}turns per arm")
    parser.add_argument("--each", type=int, default=each, help=f"{ranks}steps per turn")
    about = "tiny sizes on CPU ranks, to try the code; writes no results"
    parser.add_argument("--trial", action="store_true", help=f"{ranks}{about}")


def read_destination(options: argparse.Namespace) -> Destination:
    return Destination(options.folder, options.commit)


def run_command(main: Callable[[], int]) -> NoReturn:
    """Runs `main` as the command of a process. Errors that a user can fix are printed in one line
    and end with a nonzero exit status."""
    try:
        status = main()
    except (ValueError, OSError) as error:
        # The same line on every rank: the launcher prints it once.
        print(f"freescale: error: {error}", file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        # A failed rank must not wait for its peers while destroying its process groups.
        os._exit(status)
    sys.exit(status)
