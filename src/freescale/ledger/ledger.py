"""The ledger of one rank: named spans, collectives with their arrival, counters, step by step.

A collective has three stamps. `issued`: this rank arrived at it. `waited`: compute stopped for the
result. `done`: the result was there. A blocking collective has issued == waited. Merging the ranks
(merge.py) splits the wait at the moment when the last rank arrived: straggler time before it,
exposed communication after it (waits.py).

Another thread that communicates for the rank has a `ThreadLedger`. Its collectives block nothing
until the main thread waits for that thread; their overlap with this wait counts as waiting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.autograd import profiler as torch_profiler

from freescale.ledger.record import KINDS, CollectiveRecord, Span, sum_paths
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


_KEPT = 1024  # finished steps that wait for `drain`; older ones are dropped


OTHER = "other"  # between the spans
# Spans in which the main thread waits for other threads: for their collectives, or their work.
LANE_WAITS = ("arrive", "await batch", "await sums")


def sum_busy(
    begin: int, end: int, spans: Iterable[Span], collectives: Iterable[CollectiveRecord]
) -> dict[str, int]:
    """Sums the main thread's nanoseconds by innermost span; `other` is time outside all spans.

    Waits for collectives and spans of other threads (`thread/name`) are left out. With the waits,
    if these do not overlap, the sum is the step [begin, end). Inner spans lie within outer ones.
    """
    # (when, +1 or -1, a rule for ties, name of the span; empty for a wait)
    edges: list[tuple[int, int, int, str]] = []
    for span in spans:
        if "/" not in span.name and span.end > span.begin:
            # the longer of two spans that begin together is the outer one
            edges += [(span.begin, 1, -span.end, span.name), (span.end, -1, 0, span.name)]
    for collective in collectives:
        if collective.done > collective.waited:
            edges += [(collective.waited, 1, 0, ""), (collective.done, -1, 0, "")]
    edges.sort()
    busy: dict[str, int] = {}
    stack: list[str] = []
    waits, now = 0, begin
    for when, change, _, name in [*edges, (end, 1, 0, "")]:
        when = min(max(when, begin), end)
        if not waits and when > now:
            current = stack[-1] if stack else OTHER
            busy[current] = busy.get(current, 0) + when - now
        now = when
        if not name:
            waits += change
        elif change > 0:
            stack.append(name)
        else:
            del stack[len(stack) - 1 - stack[::-1].index(name)]
    return busy


# Spans and waits are classes: a generator's context manager and an unread label would take a good
# part of a small exchange.


class Collective(AbstractContextManager[None]):
    """One collective under way, from `Ledger.begin_collective`."""

    def __init__(
        self, ledger: Ledger | ThreadLedger, kind: str, sent: int, received: int, path: str
    ) -> None:
        assert kind in KINDS, kind
        self._ledger, self._clock = ledger, ledger.clock
        self.kind, self.sent, self.received, self.path = kind, sent, received, path
        self.far = 0  # bytes sent to ranks of other machines, of an AllToAll
        self.thread = ledger.name
        self.issued = self._clock.stamp()
        self.waited: Any = None
        self.done: Any = None
        # begin and end of the main thread's wait, if another thread waited
        self.window: tuple[Any, Any] | None = None

    def wait(self) -> AbstractContextManager[None]:
        """Surrounds the blocking part. The step that waits records the collective."""
        return self

    def __enter__(self) -> None:
        self._ledger.record(self)
        self.waited = self._clock.stamp()

    def __exit__(self, *error: object) -> None:
        self.done = self._clock.stamp()


class _Span(AbstractContextManager[None]):
    def __init__(self, step: _Step | None, clock: Clock, name: str) -> None:
        self._step, self._clock, self._name = step, clock, name
        self._label: torch.profiler.record_function | None = None
        self._begin: Any = None

    def __enter__(self) -> None:
        if torch_profiler._is_profiler_enabled:  # by any thread
            self._label = torch.profiler.record_function(f"freescale/{self._name}")
            self._label.__enter__()  # type: ignore[no-untyped-call]
        if self._step is not None:
            self._begin = self._clock.stamp()

    def __exit__(self, *error: Any) -> None:
        if self._step is not None:
            self._step.spans.append((self._name, self._begin, self._clock.stamp()))
        if self._label is not None:
            self._label.__exit__(*error)


class _Step:
    def __init__(self, number: int, begin: Any) -> None:
        self.number, self.begin, self.end = number, begin, None
        self.spans: list[tuple[str, Any, Any]] = []
        self.collectives: list[Collective] = []
        self.counters: dict[str, float | torch.Tensor] = {}


class Ledger:
    """Records where the time of each step goes on this rank.

    The pipeline begins and ends the steps; the transport records its collectives. Outside a step
    (evaluation, checkpoints) nothing is recorded. On a GPU the stamps are events on the current
    stream that `drain` reads once the device has passed them: the ledger itself never synchronizes.

    Args:
        device: The device that this rank computes on.
    """

    name = ""  # the main thread has no name

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.clock = make_clock(self.device)
        self._step: _Step | None = None
        self._finished: deque[_Step] = deque(maxlen=_KEPT)

    def __repr__(self) -> str:
        last = self._finished[-1] if self._finished else None
        text = f"Ledger({len(self._finished)} finished steps"
        if last is not None:
            text += f", last: step {last.number}"
            if isinstance(last.end, int):  # device stamps would have to be read
                text += f" in {(last.end - last.begin) / 1e6:.2f} ms"
            kinds = ", ".join(sorted({collective.kind for collective in last.collectives}))
            text += f", {len(last.spans)} spans, {len(last.collectives)} collectives ({kinds})"
        return text + ")"

    def begin_step(self, number: int) -> None:
        """Begins a step; what is recorded until `end_step` belongs to it."""
        self._step = _Step(number, self.clock.stamp())

    def end_step(self) -> None:
        """Ends the step. `drain` returns it."""
        assert self._step is not None, "end_step without begin_step"
        self._step.end = self.clock.stamp()
        self._finished.append(self._step)
        self._step = None

    def cancel_step(self) -> None:
        """Drops a step that was not run because the data had ended."""
        self._step = None

    def span(self, name: str) -> AbstractContextManager[None]:
        """Times a stage of the step, and labels it in torch's profiler as `freescale/name`."""
        return _Span(self._step, self.clock, name)

    def begin_collective(self, kind: str, sent: int, received: int, path: str) -> Collective:
        """Stamps this rank's arrival at a collective, whose `wait()` surrounds the blocking part.
        `kind`: one of `KINDS`; `sent`, `received`: bytes; `path`: what carries them, as `nccl`."""
        return Collective(self, kind, sent, received, path)

    def record(self, collective: Collective) -> None:
        """Adds a collective to the current step."""
        if self._step is not None:
            self._step.collectives.append(collective)

    def record_wait(self, collectives: list[Collective], begin: Any) -> None:
        """Adds collectives of another thread (`ThreadLedger.take`) that stopped compute since
        `begin`."""
        end = self.clock.stamp()
        for collective in collectives:
            collective.window = (begin, end)
            self.record(collective)

    def count(self, name: str, value: float | torch.Tensor) -> None:
        """Adds to a counter of the step. A tensor is read when the step is drained, not now."""
        if self._step is not None:
            self._step.counters[name] = self._step.counters.get(name, 0) + value

    def drain(self) -> list[dict[str, Any]]:
        """Returns and forgets the finished steps as plain records (see record.py), with times in
        nanoseconds of this host's clock. Never waits: steps unfinished on the device stay."""
        records: list[dict[str, Any]] = []
        while self._finished:
            record = self._read_step(self._finished[0])
            if record is None:
                break
            records.append(record)
            self._finished.popleft()
        return records

    def _read_step(self, step: _Step) -> dict[str, Any] | None:
        read = self.clock.read
        end = read(step.end)
        if end is None:
            return None
        begin = read(step.begin)
        assert begin is not None
        spans: list[Span] = []
        for name, *stamps in step.spans:
            first, last = (read(stamp) for stamp in stamps)
            # What another thread's stream has not reached yet is left out.
            if first is not None and last is not None:
                spans.append(Span(name, first, last))
        collectives = [collective for collective in step.collectives if collective.done is not None]
        records = [self._read_collective(collective) for collective in collectives]
        # Here and not in the merge: each rank sums its own.
        busy = sum_busy(begin, end, spans, records)
        lanes = sum(busy.pop(name, 0) for name in LANE_WAITS)
        if far := sum(collective.far for collective in collectives):
            step.counters["bytes_between_machines"] = far
        return {
            "step": step.number,
            "begin": begin,
            "end": end,
            "spans": [list(span) for span in spans],
            "collectives": [list(record) for record in records],
            "carriers": [[collective.thread, collective.path] for collective in collectives],
            "busy": busy,
            "lanes": lanes,
            "paths": sum_paths((each.kind, each.path, each.sent) for each in collectives),
            "counters": {name: float(value) for name, value in step.counters.items()},
        }

    def _read_collective(self, collective: Collective) -> CollectiveRecord:
        issued, waited, done = (
            self._read_passed(stamp)
            for stamp in (collective.issued, collective.waited, collective.done)
        )
        if collective.window is not None:
            begin, end = (self._read_passed(stamp) for stamp in collective.window)
            done = min(done, end)
            waited = min(max(waited, begin), done)
        return CollectiveRecord(
            collective.kind, collective.sent, collective.received, issued, waited, done
        )

    def _read_passed(self, stamp: Any) -> int:
        """Reads a stamp before the end of the step, which the device has passed."""
        time = self.clock.read(stamp)
        assert time is not None
        return time


class ThreadLedger:
    """The ledger of another thread of the rank.

    Its spans carry the thread's name; its collectives are kept until the main thread takes them.
    """

    def __init__(self, ledger: Ledger | ThreadLedger, name: str) -> None:
        self._ledger: Ledger = ledger if isinstance(ledger, Ledger) else ledger._ledger
        self.name = name
        self._collectives: list[Collective] = []
        self.clock = self._ledger.clock

    def span(self, name: str) -> AbstractContextManager[None]:
        """Times a stage of this thread in the main thread's step."""
        return self._ledger.span(f"{self.name}/{name}")

    def begin_collective(self, kind: str, sent: int, received: int, path: str) -> Collective:
        """Like `Ledger.begin_collective`."""
        return Collective(self, kind, sent, received, path)

    def record(self, collective: Collective) -> None:
        """Keeps a collective for the next `take`."""
        self._collectives.append(collective)

    def count(self, name: str, value: float | torch.Tensor) -> None:
        """Adds to a counter of the main thread's step."""
        self._ledger.count(name, value)

    def take(self) -> list[Collective]:
        """Returns what was recorded since the last call, for `Ledger.record_wait`."""
        taken, self._collectives = self._collectives, []
        return taken
