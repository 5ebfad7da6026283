"""Processes of a run as they report, and faults that have happened to it."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from faults.plan import Fault
from faults.reporter import LAUNCHER, PHASES


@dataclass
class Process:
    """A process of the run, as it reports."""

    rank: int
    pid: int
    host: int
    connection: socket.socket
    joined: float
    text: bytes = b""
    forked: bool = True  # from a process that has imported torch
    step: int = 0
    passed: dict[str, float] = field(default_factory=dict)  # moments of its start, and when


@dataclass
class Struck:
    """A fault that has happened, and the run has not gone on yet."""

    fault: Fault
    begin: float
    step: int
    moment: str
    over: float | None  # when the disturbance was over; None: the attempt ends with it
    rank: int
    world: int  # ranks of the attempt


def describe_event(
    struck: Struck, now: float, step: int, start: float, processes: Iterable[Process]
) -> dict[str, Any]:
    """The entry of a result about a fault after which the run has gone on.

    Args:
        struck: the fault.
        now: when the run has gone on.
        step: that it then made.
        start: what makes seconds of the run out of those of the clock.
        processes: of the attempt that goes on.
    """
    ranks = [process for process in processes if process.rank != LAUNCHER]
    return asdict(struck.fault) | {
        "rank": struck.rank,
        "world": struck.world,
        "struck_at": struck.moment,
        "step": struck.step,
        "goes_on_at": step,
        "begin_s": round(start + struck.begin, 3),
        "lasted_s": round(now - struck.begin, 3),
        "forked": all(process.forked for process in ranks),
    }


def split_time(
    struck: Struck, gone: float, processes: Iterable[Process], now: float
) -> dict[str, float]:
    """What the seconds from a fault to the next step were for: until all ranks had ended, the
    phases of the start, and the first step. Empty if the fault ended no attempt, or more than one.

    Args:
        struck: the fault.
        gone: when the last rank ended.
        processes: of the attempt that goes on.
        now: when it made its first step.
    """
    if struck.over is not None:
        return {}
    ranks = [process for process in processes if process.rank != LAUNCHER]
    ends = {"notice": gone}
    for phase, moment in PHASES.items():
        ends[phase] = max((process.passed.get(moment, 0.0) for process in ranks), default=0.0)
    times = [struck.begin, *ends.values(), now]
    if times != sorted(times):
        return {}
    names = [*ends, "first step"]
    return {name: round(b - a, 3) for name, a, b in zip(names, times, times[1:], strict=False)}
