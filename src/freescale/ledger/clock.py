"""Clocks for the ledger: the host's monotonic clock, or CUDA events, read later without waiting."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from freescale.streams import record_event


class Clock(Protocol):
    """Stamps moments now and reads their times later."""

    def stamp(self) -> Any:
        """Marks now: on the host, or at this point of the current stream."""

    def read(self, stamp: Any) -> int | None:
        """Nanoseconds on the host's clock; None if the device has not reached the stamp."""


class HostClock:
    """Stamps are nanoseconds of the host's monotonic clock."""

    def stamp(self) -> int:
        return time.perf_counter_ns()

    def read(self, stamp: int) -> int:
        return stamp


class CudaClock:
    """Stamps are events on the current stream. One synchronization when it is made, none
    afterwards.

    Event differences are single-precision milliseconds, which lose microseconds after some seconds;
    the base therefore moves along to a stamp that was read, every few seconds.
    """

    _REBASE_NS = 4_000_000_000

    def __init__(self) -> None:
        self._base = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._base.record()
        torch.cuda.synchronize()
        self._base_ns = time.perf_counter_ns()

    def stamp(self) -> torch.cuda.Event:
        return record_event(enable_timing=True)

    def read(self, stamp: torch.cuda.Event) -> int | None:
        if not stamp.query():  # type: ignore[no-untyped-call]
            return None
        elapsed = int(self._base.elapsed_time(stamp) * 1e6)
        moment = self._base_ns + elapsed
        if elapsed > self._REBASE_NS:
            self._base, self._base_ns = stamp, moment
        return moment


def make_clock(device: torch.device) -> Clock:
    """Returns a clock that stamps what `device` does."""
    return CudaClock() if device.type == "cuda" else HostClock()
