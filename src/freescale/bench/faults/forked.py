"""`freescale ...` in processes that are forked from one that has imported torch: to start Python
takes several seconds of a core, and a storm starts thousands of processes."""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, NoReturn

import torch

_NEEDED = (
    *("freescale.train.run", "freescale.train.restarts", "freescale.report.console"),
    *("torch._dynamo", "torch.onnx", "triton.language", "numpy.random", "rich.progress"),
    *("rich.console", "rich.table"),
)
STACKS = signal.SIGUSR2  # makes a process write where each of its threads is


def fork(work: Callable[[], None], said: int | Path, **environment: str) -> int:
    """Runs `work` in another process, which ends with it. Returns the process.

    Args:
        work: what the process does; SystemExit is its status.
        said: file for what it prints.
        environment: variables that are added to those of this process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        return child
    try:
        _become(said, environment)
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - nothing of the parent's may run on in the child
        traceback.print_exc()
        status = 1
    _leave(status)


def preload() -> None:
    """Imports what a run does, before it is forked; torch's optimizers import much when they are
    first made."""
    for name in _NEEDED:
        with suppress(ImportError):
            import_module(name)
    torch.set_num_threads(1)


def run_command(words: Sequence[str]) -> None:
    """`freescale WORDS`, in this process."""
    sys.argv = ["freescale", *words]
    runpy.run_module("freescale", run_name="__main__", alter_sys=True)


class ForkedRank:
    """A rank of launch.py, with the verbs of a Popen that it uses."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        begin: Callable[[int], None],
    ) -> None:
        """`begin`: is called in the rank, with its number, before the command."""
        self.stderr: IO[str]
        self.returncode: int | None = None
        read, write = os.pipe()

        def work() -> None:
            os.close(read)
            begin(int(environment["RANK"]))
            run_command(command[3:])

        assert list(command[:3]) == [sys.executable, "-m", "freescale"]
        self.pid = fork(work, write, **environment)
        os.close(write)
        self.stderr = os.fdopen(read, errors="replace")

    def poll(self) -> int | None:
        if self.returncode is None:
            child, status = os.waitpid(self.pid, os.WNOHANG)
            if child:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(said: int | Path, environment: Mapping[str, str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    target = said if isinstance(said, int) else os.open(said, flags, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.environ.update(environment)
    sys.stdout, sys.stderr = (
        os.fdopen(stream, "w", buffering=1, errors="replace", closefd=False) for stream in (1, 2)
    )
    faulthandler.register(STACKS, file=sys.stderr, all_threads=True)
    torch.set_num_threads(1)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
