"""A source of batches for data workers, and which processes they are."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from freescale.batch import Jagged, SequenceBatch

LARGE = 25  # every so many batches


class Counting:
    """A source of small batches, except for those that are asked to be otherwise."""

    def __init__(self, stop: int, start: int = 0, fails: int = -1) -> None:
        self.start, self.stop, self.fails = start, stop, fails

    def batch(self, number: int) -> SequenceBatch:
        if number == self.fails:
            raise ValueError(f"batch {number} is broken")
        size = 1 << 17 if number % LARGE == LARGE - 1 else 3
        values = torch.arange(number, number + size)
        return SequenceBatch(
            {"history": Jagged(values, torch.tensor([size]), span=size - 1)},
            weights={"t": torch.ones(1)},
            number=number,
            shared={"negatives": values[:2] * 2},
        )


def read_children() -> list[int]:
    """Servers that this process has started and not waited for, and their workers; other tests of
    the process may have children of their own."""
    return sorted([*_read_servers(), *read_workers()])


def read_workers() -> list[int]:
    """Data workers of this process's servers."""
    return sorted(worker for server in _read_servers() for worker in _list_children(server))


def _read_servers() -> list[int]:
    children = _list_children(os.getpid())
    return [pid for pid in children if b"worker_process" in _read_command(pid)]


def read_parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[1])


def wait_for_end(process: int) -> None:
    """Raises ProcessLookupError once a process has ended, waited for or not."""
    for _ in range(4000):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[0]
        except OSError:
            state = "Z"
        if state == "Z":
            raise ProcessLookupError(process)
        time.sleep(0.05)


def _list_children(process: int) -> list[int]:
    found: list[str] = []
    with suppress(OSError):  # it has ended
        for task in Path(f"/proc/{process}/task").iterdir():
            found += (task / "children").read_text().split()
    return list(map(int, found))


def _read_command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
