"""Arms of a benchmark that take turns in one process, and the memory of that process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist


def take_turns(arms: dict[str, Any], repetitions: int, steps: int) -> dict[str, dict[str, Any]]:
    """Arms in turn, `steps` steps each time, the first time not counted. The first step of a turn
    is not counted either: what it would have to wait for was done before, while the arms changed.
    Per arm: all losses, and the ledger's records of the others."""
    names = list(arms)
    measured: dict[str, dict[str, Any]] = {name: {"losses": [], "records": []} for name in names}
    for repetition in range(repetitions + 1):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            measured[name]["losses"] += [arms[name].step() for _ in range(steps)]
            arms[name].quiet()
            records = arms[name].ledger.drain()
            if repetition:
                measured[name]["records"] += records[1:]
    dist.barrier()
    return measured


def read_peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes."""
    return _read_status("VmHWM")


def read_resident_memory() -> int:
    """Resident memory of this process now, in bytes."""
    return _read_status("VmRSS")


def _read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
