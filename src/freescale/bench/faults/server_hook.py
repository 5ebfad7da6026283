"""In the process that ranks of `freescale train --restarts` are forked from: they report to the
storm before their work. Imports no torch: the process does so as it would without a storm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from freescale.train import rank_process

STORM = "FREESCALE_STORM"  # the address of the storm and the folder of the logs, for ranks


def hook_server() -> None:
    """Makes ranks report that are forked from this process. Leaves word when they can be forked."""
    preload, run_module = rank_process.preload, rank_process.run_module

    def preload_and_tell() -> None:
        preload()
        find_word(os.environ[STORM], os.getppid()).touch()

    def report_and_run(module: str, arguments: Sequence[str]) -> None:
        from freescale.bench.faults.command_testbed import report_from_environment

        report_from_environment(forked=True)
        run_module(module, arguments)

    rank_process.preload, rank_process.run_module = preload_and_tell, report_and_run


def find_word(storm: str, launcher: int) -> Path:
    """The file that is there when the next ranks of a launcher can be forked.

    Args:
        storm: what `STORM` says.
        launcher: its process.
    """
    return Path(storm.split(os.pathsep)[1]).parent / f"server-of-{launcher}"
