"""Runs that start as anyone's do, by `freescale train --restarts` or torchrun. A rank that is a new
process of Python imports the reporter before its work, by a `sitecustomize` module on its path. In
the process that other ranks are forked from, the module puts it before their work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from freescale_bench.common.repository import package_path

from faults.command_reports import STORM
from faults.testbed import RESTARTS, LocalTestbed, end_with_storm

_TESTS = str(Path(__file__).resolve().parents[1])
_CUSTOMIZE = f"""
import os

if "{STORM}" in os.environ:
    if "RANK" in os.environ:
        from faults.command_reports import report_from_environment

        report_from_environment(forked=False)
    else:
        from faults.command_reports import hook_server

        hook_server()
"""


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
            "PYTHONPATH": os.pathsep.join([str(self._site), _TESTS, package_path()]),
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
