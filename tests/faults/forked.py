"""`freescale ...` in processes that are forked from one that has imported torch: to start Python
takes several seconds of a core, and a storm starts thousands of processes."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from freescale.launch.rank_process import run_module
from freescale.launch.rank_server import ForkedRank

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


def run_command(words: Sequence[str]) -> None:
    """`freescale WORDS`, in this process."""
    run_module("freescale", words)


def fork_rank(
    command: Sequence[str], environment: Mapping[str, str], begin: Callable[[int], None]
) -> ForkedRank:
    """A rank of launch/ranks.py. `begin`: is called in it, with its number, before the command."""
    read, write = os.pipe()

    def work() -> None:
        os.close(read)
        begin(int(environment["RANK"]))
        run_command(command[3:])

    assert list(command[:3]) == [sys.executable, "-m", "freescale"]
    pid = fork(work, write, **environment)
    os.close(write)
    return ForkedRank(pid, os.fdopen(read, errors="replace"))


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
