"""The ledger of one rank: named spans, collectives with their arrival, counters, step by step.

A collective has three stamps. `issued`: this rank arrived and asked for it. `waited`: its compute stopped for the
result. `done`: the result was there. A blocking collective has issued == waited. Merging the ranks (figures.py) splits
the wait at the moment the last rank arrived: straggler time before it, exposed communication after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from freescale.observe.clock import clock_for

KINDS = ("counts", "ids", "rows", "gradients", "samples", "dense")


_KEPT = 1024  # finished steps that wait to be drained; who never drains keeps the last ones


class Arrival:
    """One collective under way."""

    def __init__(self, ledger: Ledger, kind: str, sent: int, received: int) -> None:
        self._ledger, self._clock = ledger, ledger.clock
        self.kind, self.sent, self.received = kind, sent, received
        self.issued = self._clock.stamp()
        self.waited: Any = None
        self.done: Any = None

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Around the blocking part. The collective is recorded in the step that waits for it, which may be a later one."""
        self._ledger.record(self)
        self.waited = self._clock.stamp()
        try:
            yield
        finally:
            self.done = self._clock.stamp()


class _Step:
    def __init__(self, number: int, begin: Any) -> None:
        self.number, self.begin, self.end = number, begin, None
        self.spans: list[tuple[str, Any, Any]] = []
        self.arrivals: list[Arrival] = []
        self.counters: dict[str, float | torch.Tensor] = {}


class Ledger:
    """Records between `begin_step` and `end_step`; outside a step (evaluation, checkpoints) nothing is recorded."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.clock = clock_for(torch.device(device))
        self._step: _Step | None = None
        self._finished: deque[_Step] = deque(maxlen=_KEPT)

    def begin_step(self, number: int) -> None:
        self._step = _Step(number, self.clock.stamp())

    def end_step(self) -> None:
        assert self._step is not None, "end_step without begin_step"
        self._step.end = self.clock.stamp()
        self._finished.append(self._step)
        self._step = None

    def cancel_step(self) -> None:
        """Forgets a step that did not take place (the data had ended)."""
        self._step = None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A stage of the step; also a label in torch's own profiler."""
        step = self._step
        with torch.profiler.record_function(f"freescale/{name}"):
            if step is None:
                yield
                return
            begin = self.clock.stamp()
            try:
                yield
            finally:
                step.spans.append((name, begin, self.clock.stamp()))

    def arrive(self, kind: str, sent: int, received: int) -> Arrival:
        """This rank has arrived at a collective; call `wait()` on the result around the blocking part."""
        assert kind in KINDS, kind
        return Arrival(self, kind, sent, received)

    def record(self, arrival: Arrival) -> None:
        if self._step is not None:
            self._step.arrivals.append(arrival)

    def count(self, name: str, value: float | torch.Tensor) -> None:
        """Adds to a counter of the step. A tensor is read when the step is drained, not now."""
        if self._step is not None:
            self._step.counters[name] = self._step.counters.get(name, 0) + value

    def drain(self) -> list[dict]:
        """Finished steps as plain data, times in nanoseconds of this host's clock. Steps that the device has not finished
        stay for the next call; nothing is waited for."""
        records: list[dict] = []
        while self._finished:
            record = self._plain(self._finished[0])
            if record is None:
                break
            records.append(record)
            self._finished.popleft()
        return records

    def _plain(self, step: _Step) -> dict | None:
        read = self.clock.read
        end = read(step.end)
        if end is None:
            return None
        return {
            "step": step.number,
            "begin": read(step.begin),
            "end": end,
            "spans": [[name, read(a), read(b)] for name, a, b in step.spans],
            "collectives": [
                [a.kind, a.sent, a.received, read(a.issued), read(a.waited), read(a.done)]
                for a in step.arrivals
                if a.done is not None
            ],
            "counters": {name: float(value) for name, value in step.counters.items()},
        }
