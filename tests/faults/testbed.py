"""Where a run under a storm happens: its processes, its disk and its network.

On one machine a launcher (`freescale train --nproc N --restarts ...`) starts the ranks again; over
hosts (network namespaces) each has an agent of torchrun. What dies with its launcher or agent, the
testbed starts again, as a scheduler does.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from faults.forked import fork, fork_rank, run_command
from faults.reporter import LAUNCHER, report_to
from freescale.launch import rank_server, ranks

RESTARTS = 1_000_000  # of one launcher
_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of unshare
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
_BECOME_REAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl
_DISK_MB = 64


class LocalTestbed:
    """Ranks of one machine.

    Attributes:
        world: number of ranks of the present attempt.
        launchers: of each host its launcher's process, or None while there is none.
    """

    def __init__(
        self, folder: Path, worlds: Sequence[int], address: Path, *, double: bool = False
    ) -> None:
        """
        Args:
            folder: for everything of the run.
            worlds: numbers of ranks. With several of them each start has the next one, and the
                launcher starts nothing again by itself.
            address: of the storm's socket.
            double: whether the run trains in float64.
        """
        self.world = worlds[0]
        self._worlds, self._starts, self._double = worlds, 0, double
        self._folder, self._address = folder, address
        self.launchers: list[int | None] = [None]
        (folder / "samples").mkdir(parents=True, exist_ok=True)

    @property
    def said(self) -> Path:
        """What the processes print."""
        return self._folder / "output.txt"

    def start(self, host: int, words: Sequence[str], inherited: Callable[[], None]) -> None:
        """Starts the launcher of a host with `freescale WORDS`.

        Args:
            inherited: closes, in the new process, what belongs to the storm.
        """
        address, logs = self._address, self._folder / "samples"
        command = [*words, *self._count_ranks()]

        def begin(rank: int) -> None:
            report_to(address, logs, rank, host)
            set_precision(double=self._double)

        def work() -> None:
            end_with_storm()
            inherited()
            report_to(address, logs, LAUNCHER, host)
            # ranks are forked from the storm already: no other process need import torch
            rank_server.is_supported = lambda: False
            ranks.start_rank = partial(fork_rank, begin=begin)
            run_command(command)

        self.launchers[host] = fork(work, self.said, OMP_NUM_THREADS="1")

    def _count_ranks(self) -> list[str]:
        """Options of the launcher that starts now."""
        self.world = self._worlds[self._starts % len(self._worlds)]
        self._starts += 1
        again = ["--restarts", str(RESTARTS)] if len(self._worlds) == 1 else []
        return ["--nproc", str(self.world), *again]

    def note_end(self, status: int) -> None:
        """A launcher has ended, with a status or minus the number of a signal."""

    def may_start(self) -> bool:
        """Whether a launcher that is missing may be started now."""
        return True

    def is_on(self, process: int, host: int) -> bool:
        return host == 0

    def close(self) -> None:
        """Ends what is left."""


def set_precision(*, double: bool) -> None:
    """Whether this process trains in float64, instead of float32."""
    torch.set_default_dtype(torch.float64 if double else torch.float32)


# ---- a disk of its own


def mount_disk(image: Path, folder: Path) -> bool:
    """Mounts `image`, which is made if there is none, at `folder`: for this process and those that
    it starts, until they have ended. Returns whether that is possible here."""
    if shutil.which("mkfs.ext4") is None or ctypes.CDLL(None).unshare(_NEW_MOUNTS):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    if not image.exists():
        with open(image, "wb") as file:
            file.truncate(_DISK_MB << 20)
        _run("mkfs.ext4", "-q", "-O", "^has_journal", str(image))
    private = ["mount", "--make-rprivate", "/"]
    return not _run(*private) and not _run("mount", "-o", "loop", str(image), str(folder))


def fill_disk(ballast: Path) -> None:
    """Takes all room that is left on the disk, in a file to remove."""
    with open(ballast, "wb", buffering=0) as file:
        piece = 1 << 20
        while piece:
            try:
                file.write(b"\1" * piece)
            except OSError:
                piece //= 2


def adopt_orphans() -> None:
    """Processes whose parent is killed become children of this one, which waits for them."""
    ctypes.CDLL(None).prctl(_BECOME_REAPER, 1, 0, 0, 0)


def end_with_storm() -> None:
    """In a launcher: it is killed with the storm, and starts nothing again after that."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)


def kill(process: int | None, number: int = signal.SIGKILL) -> None:
    if process is not None:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _run(*command: str) -> int:
    return subprocess.run(command, capture_output=True, check=False).returncode
