"""Measures how long this rank computes in a step: adaptive balancing learns from it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from freescale.ledger.ledger import Clock


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
        """`wanted`: if False, nothing is measured. One step of `every` is measured."""
        self._wanted, self._every, self._measures = wanted, every, wanted
        self._clock: Clock | _ThreadClock = _ThreadClock() if device.type == "cpu" else clock
        self._running: list[tuple[Any, Any]] = []
        self._finished: deque[tuple[int, list[tuple[Any, Any]]]] = deque([(0, [])], maxlen=2)

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
        self._finished.append((step, self._running))
        self._running = []
        self._measures = self._wanted and step % self._every == 0

    def last(self, before: bool = False) -> tuple[int, int]:
        """The last step that was finished, or the one `before`, and its nanoseconds of compute: 0
        if it was not measured, if the device has not reached its end yet, or had nothing to do."""
        step, stamps = self._finished[0 if before else -1]
        read = [(self._clock.read(begin), self._clock.read(end)) for begin, end in stamps]
        if any(end is None for _, end in read):
            return step, 0
        return step, sum(
            end - begin for begin, end in read if begin is not None and end is not None
        )
