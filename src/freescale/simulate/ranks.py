"""The ranks of a run in simulated time: every value is a vector over the ranks, every collective a
meeting of all of them.

Each rank has a main thread that computes, lanes that communicate alongside (`ahead`, `urgent`,
`input`; see pipeline/staged.py) and one network link. A collective begins when its last rank has
arrived. The records are those of the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAIN, AHEAD, URGENT, INPUT = "main", "ahead", "urgent", "input"
PerRank = NDArray[np.float64]  # [ranks]
Times = PerRank  # seconds


class Message(NamedTuple):
    """What a collective moves and takes, each [ranks]."""

    sent: PerRank  # bytes
    received: PerRank
    seconds: Times


@dataclass
class Meeting:
    """A collective in progress, with the timestamps of ledger/ledger.py."""

    kind: str
    path: str
    sent: PerRank  # bytes
    received: PerRank
    issued: Times
    waited: Times
    done: Times


@dataclass
class Step:
    """The ledger entries of all ranks for a step."""

    number: int
    begin: Times
    end: Times
    spans: list[tuple[str, Times, Times]] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
    counters: dict[str, PerRank] = field(default_factory=dict)


@dataclass(frozen=True)
class Overlap:
    """Work of a lane that slows concurrent compute down to `speed`: 0 stops it, 1 has no effect."""

    begin: Times
    end: Times
    speed: float


class Ranks:
    """All ranks, with the current time of each lane."""

    def __init__(self, ranks: int, queue: float = 0.0) -> None:
        """`queue`: seconds of traffic in a network card's queue (network.Network.queue_ms)."""
        self.ranks, self.queue = ranks, queue
        self.now: dict[str, Times] = {
            lane: np.zeros(ranks) for lane in (MAIN, AHEAD, URGENT, INPUT)
        }
        self.step = Step(0, np.zeros(ranks), np.zeros(ranks))
        self._wire = np.zeros(ranks)  # busy until then with urgent or blocking traffic
        self._overlaps: list[Overlap] = []  # work of the lanes in this step
        self._bulk: list[tuple[Times, Times]] = []  # transfers of the lane `ahead` in this step
        # meetings until the main thread waits for them
        self._taken: dict[str, list[Meeting]] = {lane: [] for lane in (AHEAD, URGENT, INPUT)}

    # ---- steps

    def begin_step(self, number: int) -> None:
        self.step = Step(number, self.now[MAIN].copy(), self.now[MAIN].copy())

    def end_step(self) -> Step:
        self.step.end = self.now[MAIN].copy()
        return self.step

    def submit(self, lane: str) -> None:
        """The main thread gives a lane its next job; it begins when both are ready."""
        self.now[lane] = np.maximum(self.now[lane], self.now[MAIN])
        if lane == AHEAD:
            self._overlaps, self._bulk = [], []

    # ---- verbs

    def work(
        self,
        name: str,
        seconds: Times | float,
        lane: str = MAIN,
        part: float = 1.0,
        *,
        on_device: bool = True,
    ) -> None:
        """Work of a lane. On a side lane it takes the device from compute, unless copy engines do
        it (`on_device`); `part` of it is not hidden behind the lane's own transfers (pieces are
        sent while others are worked on)."""
        begin = self.now[lane]
        end = begin + np.asarray(seconds)
        self.now[lane] = begin + part * np.asarray(seconds)
        if lane != MAIN and on_device:
            self._add(Overlap(begin, end, 0.0))
        self.step.spans.append((name if lane == MAIN else f"{lane}/{name}", begin, end))

    def compute(self, name: str, seconds: Times) -> None:
        """Forward or backward on the main thread, slowed down by concurrent work of the lanes."""
        begin = self.now[MAIN]
        self.now[MAIN] = slow_down(begin, seconds, self._overlaps)
        self.step.spans.append((name, begin, self.now[MAIN]))

    def meet(
        self,
        kind: str,
        path: str,
        message: Message,
        lane: str = MAIN,
        *,
        slowdown: float = 1.0,
        overtakes: bool = False,
    ) -> None:
        """A collective that its lane waits for. `slowdown`: of concurrent compute; `overtakes`: it
        precedes bulk traffic."""
        begin = np.full(self.ranks, self.now[lane].max())
        cost = np.broadcast_to(np.asarray(message.seconds, np.float64), begin.shape)
        done = self._transmit(begin, cost, lane, overtakes)
        self._record(kind, path, message, lane, done)
        if lane != MAIN and slowdown > 1:
            self._add(Overlap(begin, done, 1 / slowdown))

    def tell(self, kind: str, path: str, message: Message, lane: str) -> None:
        """A collective of the host that its lane waits for, too small to load the network."""
        done = np.full(self.ranks, self.now[lane].max()) + np.asarray(message.seconds)
        self._record(kind, path, message, lane, done)

    def _record(self, kind: str, path: str, message: Message, lane: str, done: Times) -> None:
        issued = self.now[lane]
        meetings = self.step.meetings if lane == MAIN else self._taken[lane]
        meetings.append(Meeting(kind, path, *message[:2], issued, issued, done))
        self.now[lane] = done

    def _add(self, overlap: Overlap) -> None:
        self._overlaps.append(overlap)
        self._overlaps.sort(key=lambda one: float(one.begin.mean()))

    def issue(self, kind: str, path: str, message: Message) -> Meeting:
        """A collective of the main thread that nobody waits for yet."""
        issued = self.now[MAIN]
        done = np.full(self.ranks, issued.max()) + np.asarray(message.seconds)
        return Meeting(kind, path, *message[:2], issued.copy(), issued.copy(), done)

    def send(
        self, kind: str, path: str, message: Message, *, after: Meeting | None, slowdown: float
    ) -> Meeting:
        """Like `issue`, over the network and after `after`; slows down the compute it overlaps."""
        issued = self.now[MAIN]
        begin = np.full(self.ranks, issued.max())
        if after is not None:
            begin = np.maximum(begin, after.done)
        done = self._transmit(begin, message.seconds, MAIN, False)
        if slowdown > 1:
            self._add(Overlap(begin, done, 1 / slowdown))
        return Meeting(kind, path, *message[:2], issued.copy(), issued.copy(), done)

    def wait(self, meeting: Meeting | None) -> None:
        """The main thread waits for a result."""
        if meeting is None:
            return
        meeting.waited = self.now[MAIN].copy()
        meeting.done = np.maximum(meeting.done, meeting.waited)
        self.now[MAIN] = meeting.done.copy()
        self.step.meetings.append(meeting)

    def arrive(self, span: str = "arrive", lanes: Sequence[str] = (AHEAD, URGENT)) -> None:
        """The main thread waits for the lanes. Each of their collectives has stopped it for the
        part that lies in this wait."""
        begin = self.now[MAIN]
        end = np.maximum.reduce([begin, *(self.now[lane] for lane in lanes)])
        for lane in lanes:
            for meeting in self._taken[lane]:
                meeting.done = np.minimum(meeting.done, end)
                meeting.waited = np.minimum(np.maximum(meeting.waited, begin), meeting.done)
                self.step.meetings.append(meeting)
            self._taken[lane] = []
        self.now[MAIN] = end
        self.step.spans.append((span, begin, end))

    # ---- the network

    def _transmit(self, begin: Times, cost: Times, lane: str, overtakes: bool) -> Times:
        """When a transfer has arrived. Two concurrent transfers share the network equally, unless
        one overtakes; nothing overtakes what is already in the card's queue."""
        if lane == AHEAD:
            self._bulk.append((begin, begin + cost))
            return begin + cost
        left = np.maximum(self._wire - begin, 0.0)
        bulk = sum(
            (np.maximum(end - np.maximum(start, begin), 0.0) for start, end in self._bulk),
            np.zeros(self.ranks),
        )
        if not overtakes:
            left = left + bulk
        queued = np.minimum(left, self.queue)
        done: Times = begin + cost + queued + np.minimum(cost, left - queued)
        self._wire = np.maximum(self._wire, begin) + cost
        # Bulk transfers end that much later.
        late = np.where(bulk > 0, cost, 0.0)
        self.now[AHEAD] = self.now[AHEAD] + late
        self._bulk = [(start, end + late) for start, end in self._bulk]
        return done


def slow_down(begin: Times, seconds: Times, overlaps: list[Overlap]) -> Times:
    """When `seconds` of compute that begin at `begin` are done, alongside the work of the lanes."""
    now, left = begin.astype(np.float64), np.asarray(seconds, np.float64).copy()
    for one in overlaps:  # in order of their begin; of two that overlap, the first one counts
        before = np.minimum(left, np.maximum(one.begin - now, 0.0))
        now, left = now + before, left - before
        busy = left > 0
        lasting = np.where(busy, np.maximum(one.end - np.maximum(now, one.begin), 0.0), 0.0)
        done = np.minimum(left, lasting * one.speed)
        ended = busy & (done >= left)
        now = now + np.where(ended, left / one.speed if one.speed else 0.0, lasting)
        left = left - done
    return now + left
