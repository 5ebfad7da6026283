"""The ledger of one rank: named spans, collectives with their arrival, counters, step by step.

A collective has three stamps. `issued`: this rank arrived and asked for it. `waited`: its compute
stopped for the result. `done`: the result was there. A blocking collective has issued == waited.
Merging the ranks (summary.py) splits the wait at the moment the last rank arrived: straggler time
before it, exposed communication after it.

Another thread of the rank that communicates for it has a `Side` of the ledger. Its collectives stop
nobody until the main thread waits for that thread: what counts as waiting is then the part of each
that falls into this window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from freescale.ledger.busy import LANES, busy
from freescale.ledger.clock import clock_for

KINDS = ("counts", "ids", "rows", "gradients", "samples", "dense")


_KEPT = 1024  # finished steps that wait to be drained; who never drains keeps the last ones


class Arrival:
    """One collective under way."""

    def __init__(
        self, ledger: Ledger | Side, kind: str, sent: int, received: int, path: str
    ) -> None:
        self._ledger, self._clock = ledger, ledger.clock
        self.kind, self.sent, self.received, self.path = kind, sent, received, path
        self.lane = ledger.name
        self.issued = self._clock.stamp()
        self.waited: Any = None
        self.done: Any = None
        # begin and end of the main thread's wait, if another thread waited
        self.window: tuple[Any, Any] | None = None

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Around the blocking part. The collective is recorded in the step that waits for it, which
        may be a later one."""
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
    """Records between `begin_step` and `end_step`; outside a step (evaluation, checkpoints) nothing
    is recorded."""

    name = ""  # of the thread; the main one has none

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.clock = clock_for(torch.device(device))
        self._step: _Step | None = None
        self._finished: deque[_Step] = deque(maxlen=_KEPT)

    def __repr__(self) -> str:
        last = self._finished[-1] if self._finished else None
        text = f"Ledger({len(self._finished)} finished steps"
        if last is not None:
            text += f", last: step {last.number}"
            if isinstance(last.end, int):  # of a device it would have to be read
                text += f" in {(last.end - last.begin) / 1e6:.2f} ms"
            kinds = ", ".join(sorted({arrival.kind for arrival in last.arrivals}))
            text += f", {len(last.spans)} spans, {len(last.arrivals)} collectives ({kinds})"
        return text + ")"

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

    def arrive(self, kind: str, sent: int, received: int, path: str) -> Arrival:
        """This rank has arrived at a collective; call `wait()` on the result around the blocking
        part. `path`: what carries it."""
        assert kind in KINDS, kind
        return Arrival(self, kind, sent, received, path)

    def record(self, arrival: Arrival) -> None:
        if self._step is not None:
            self._step.arrivals.append(arrival)

    def waited_for(self, arrivals: list[Arrival], begin: Any) -> None:
        """The compute stopped from `begin` until now for what another thread did."""
        end = self.clock.stamp()
        for arrival in arrivals:
            arrival.window = (begin, end)
            self.record(arrival)

    def count(self, name: str, value: float | torch.Tensor) -> None:
        """Adds to a counter of the step. A tensor is read when the step is drained, not now."""
        if self._step is not None:
            self._step.counters[name] = self._step.counters.get(name, 0) + value

    def drain(self) -> list[dict]:
        """Finished steps as plain data, times in nanoseconds of this host's clock. Steps that the
        device has not finished stay for the next call; nothing is waited for."""
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
        begin = read(step.begin)
        assert begin is not None
        # What another thread's stream has not reached yet is left out.
        spans = [
            [name, *times]
            for name, *stamps in step.spans
            if None not in (times := [read(s) for s in stamps])
        ]
        arrivals = [arrival for arrival in step.arrivals if arrival.done is not None]
        collectives = [self._times(arrival) for arrival in arrivals]
        # here and not where ranks are merged: each rank does its own
        spent = busy(begin, end, spans, collectives)
        lanes = sum(spent.pop(name, 0) for name in LANES)
        return {
            "step": step.number,
            "begin": begin,
            "end": end,
            "spans": spans,
            "collectives": collectives,
            # of each collective: thread and path
            "carriers": [[arrival.lane, arrival.path] for arrival in arrivals],
            "busy": spent,
            "lanes": lanes,  # waits for what this rank's other threads do themselves
            "paths": _by_path(arrivals),
            "counters": {name: float(value) for name, value in step.counters.items()},
        }

    def _times(self, arrival: Arrival) -> list:
        read = self.clock.read
        waited, done = read(arrival.waited), read(arrival.done)
        if arrival.window is not None:
            begin, end = (read(stamp) for stamp in arrival.window)
            assert waited is not None and done is not None and begin is not None and end is not None
            done = min(done, end)
            waited = min(max(waited, begin), done)
        return [arrival.kind, arrival.sent, arrival.received, read(arrival.issued), waited, done]


def _by_path(arrivals: Iterable[Arrival]) -> dict[str, dict[str, int]]:
    """Bytes that left this rank, by kind and by what carried them."""
    paths: dict[str, dict[str, int]] = {}
    for arrival in arrivals:
        of_kind = paths.setdefault(arrival.kind, {})
        of_kind[arrival.path] = of_kind.get(arrival.path, 0) + arrival.sent
    return paths


class Side:
    """The ledger of another thread: its spans carry its name, its collectives wait until the main
    thread takes them over."""

    def __init__(self, ledger: Ledger | Side, name: str) -> None:
        self._ledger: Ledger = ledger if isinstance(ledger, Ledger) else ledger._ledger
        self.name = name
        self._arrivals: list[Arrival] = []
        self.clock = self._ledger.clock

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._ledger.span(f"{self.name}/{name}")

    def arrive(self, kind: str, sent: int, received: int, path: str) -> Arrival:
        assert kind in KINDS, kind
        return Arrival(self, kind, sent, received, path)

    def record(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)

    def count(self, name: str, value: float | torch.Tensor) -> None:
        self._ledger.count(name, value)

    def take(self) -> list[Arrival]:
        """What was recorded since the last call."""
        taken, self._arrivals = self._arrivals, []
        return taken
