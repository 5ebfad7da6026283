"""What ranks that a command starts do before their work, new processes and forked ones: they report
to the storm. Imports no torch: the process that ranks are forked from does so as it would without a
storm."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from freescale.launch import rank_process
from freescale.launch.ranks import has_launcher

STORM = "FREESCALE_STORM"  # the address of the storm and the folder of the logs, for ranks
_PATIENCE = 120.0  # seconds that a rank waits for the process that the next ones are forked from


def hook_server() -> None:
    """Makes ranks report that are forked from this process. Leaves word when they can be forked."""
    preload, run_module = rank_process.preload, rank_process.run_module

    def preload_and_tell() -> None:
        preload()
        find_word(os.environ[STORM], os.getppid()).touch()

    def report_and_run(module: str, arguments: Sequence[str]) -> None:
        report_from_environment(forked=True)
        run_module(module, arguments)

    rank_process.preload, rank_process.run_module = preload_and_tell, report_and_run
    rank_process._NICENESS = 0  # the ranks wait for it: on a busy machine, for minutes otherwise


def report_from_environment(*, forked: bool) -> None:
    """Makes this rank report to the storm. What it starts in turn is no rank."""
    from faults.reporter import Start, report_to

    told = os.environ.pop(STORM)
    address, logs = map(Path, told.split(os.pathsep))
    word = find_word(told, os.getppid())

    def await_server() -> None:
        end = time.monotonic() + _PATIENCE
        while has_launcher() and not word.exists() and time.monotonic() < end:
            time.sleep(0.05)

    report_to(address, logs, int(os.environ["RANK"]), 0, Start(forked, await_server))


def find_word(storm: str, launcher: int) -> Path:
    """The file that is there when the next ranks of a launcher can be forked.

    Args:
        storm: what `STORM` says.
        launcher: its process.
    """
    return Path(storm.split(os.pathsep)[1]).parent / f"server-of-{launcher}"
