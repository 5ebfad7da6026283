"""Runs that start as anyone's do, by `freescale train --restarts` or torchrun. A rank that is a new
process of Python imports the reporter before its work, by a `sitecustomize` module on its path. In
the process that other ranks are forked from, the module puts it before their work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from freescale.bench.common.repository import package_path
from freescale.bench.faults.reporter import Start, report_to
from freescale.bench.faults.server_hook import STORM, find_word
from freescale.bench.faults.testbed import RESTARTS, LocalTestbed, end_with_storm
from freescale.train.launch import has_launcher

_CUSTOMIZE = f"""
import os

if "{STORM}" in os.environ:
    if "RANK" in os.environ:
        from freescale.bench.faults.command_testbed import report_from_environment

        report_from_environment(forked=False)
    else:
        from freescale.bench.faults.server_hook import hook_server

        hook_server()
"""
_PATIENCE = 60.0  # seconds that a rank waits for the process that the next ones are forked from


class CommandTestbed(LocalTestbed):
    """Ranks of one machine, which a command starts."""

    def __init__(self, folder: Path, world: int, address: Path, *, torchrun: bool) -> None:
        super().__init__(folder, [world], address)
        self._torchrun = torchrun
        self._site = folder / "site"
        self._site.mkdir(exist_ok=True)
        (self._site / "sitecustomize.py").write_text(_CUSTOMIZE, encoding="utf-8")

    def start(self, host: int, words: Sequence[str], inherited: Callable[[], None]) -> None:
        """A new program inherits nothing of the storm: its files are closed."""
        command = [sys.executable, "-m", "freescale", *words]
        if self._torchrun:
            command[1:2] = ["-m", "torch.distributed.run", "--standalone", *self._of_torchrun()]
        else:
            command += ["--nproc", str(self.world), "--restarts", str(RESTARTS)]
        told = {
            "PYTHONPATH": os.pathsep.join([str(self._site), package_path()]),
            "OMP_NUM_THREADS": "1",
            STORM: os.pathsep.join(map(str, (self._address, self._folder / "samples"))),
        }
        with open(self.said, "ab") as said:
            # the storm waits for it, not this object
            self.launchers[host] = subprocess.Popen(
                command,
                env=os.environ | told,
                stdout=said,
                stderr=said,
                preexec_fn=end_with_storm,
            ).pid

    def _of_torchrun(self) -> list[str]:
        return ["--nproc-per-node", str(self.world), "--max-restarts", str(RESTARTS), "-m"]


def report_from_environment(*, forked: bool) -> None:
    """Makes this rank report to the storm. What it starts in turn is no rank."""
    told = os.environ.pop(STORM)
    address, logs = map(Path, told.split(os.pathsep))
    word = find_word(told, os.getppid())

    def await_server() -> None:
        end = time.monotonic() + _PATIENCE
        while has_launcher() and not word.exists() and time.monotonic() < end:
            time.sleep(0.05)

    report_to(address, logs, int(os.environ["RANK"]), 0, Start(forked, await_server))
