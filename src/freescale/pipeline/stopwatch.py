"""Measures how long this rank computes in a step: adaptive balancing learns from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from freescale.ledger.clock import Clock


class _ThreadClock:
    """Nanoseconds that this thread has worked. On a CPU the rank's other threads take the core in
    between, and their work is no property of a sample."""

    def stamp(self) -> int:
        return time.thread_time_ns()

    def read(self, stamp: int) -> int:
        return stamp


class Stopwatch:
    """Takes stamps on the device's clock and reads them once the device has passed them; it never
    waits for the device."""

    def __init__(
        self, clock: Clock, device: torch.device, wanted: bool = True, every: int = 1
    ) -> None:
        """`wanted`: whether anybody reads it; otherwise nothing is measured. One step of `every` is
        measured."""
        self._wanted, self._every, self._measures = wanted, every, wanted
        self._clock: Clock | _ThreadClock = _ThreadClock() if device.type == "cpu" else clock
        self._running: list[tuple[Any, Any]] = []
        self._last: tuple[int, list[tuple[Any, Any]]] = (0, [])

    def computing(self) -> AbstractContextManager[None]:
        """Around a part of a step's compute."""
        return self._measure() if self._measures else nullcontext()

    @contextmanager
    def _measure(self) -> Iterator[None]:
        begin = self._clock.stamp()
        yield
        self._running.append((begin, self._clock.stamp()))

    def finish(self, step: int) -> None:
        """Ends the measurement of a step whose compute is issued."""
        self._last, self._running = (step, self._running), []
        self._measures = self._wanted and step % self._every == 0

    def last(self) -> tuple[int, int]:
        """The last step that was finished and its nanoseconds of compute: 0 if it was not measured,
        if the device has not reached its end yet, or had nothing to do."""
        step, stamps = self._last
        read = [(self._clock.read(begin), self._clock.read(end)) for begin, end in stamps]
        if any(end is None for _, end in read):
            return step, 0
        return step, sum(
            end - begin for begin, end in read if begin is not None and end is not None
        )
