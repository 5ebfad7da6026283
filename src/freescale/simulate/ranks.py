"""The ranks of a run in simulated time: every value is a vector over the ranks, every collective a
meeting of all of them.

Each rank has a main thread that computes, lanes that communicate beside it (`ahead`, `urgent`,
`input`; see pipeline/staged.py) and one way to the network. A collective begins when its last rank
has arrived. What is recorded is what the ledger records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MAIN, AHEAD, URGENT, INPUT = "main", "ahead", "urgent", "input"
PerRank = NDArray[np.float64]  # [ranks]
Times = PerRank  # seconds


@dataclass
class Meeting:
    """A collective under way; the stamps of ledger/ledger.py."""

    kind: str
    path: str
    sent: PerRank  # bytes
    received: PerRank
    issued: Times
    waited: Times
    done: Times


@dataclass
class Step:
    """What the ledgers of all ranks hold of a step."""

    number: int
    begin: Times
    end: Times
    spans: list[tuple[str, Times, Times]] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
    counters: dict[str, PerRank] = field(default_factory=dict)


@dataclass(frozen=True)
class Beside:
    """Something of a lane that slows the compute beside it down to `speed`: 0 stops it, 1 does not
    touch it."""

    begin: Times
    end: Times
    speed: float


class Ranks:
    def __init__(self, ranks: int, queue: float = 0.0) -> None:
        """`queue`: seconds of traffic that stand before a card in one queue
        (network.Network.queue_ms)."""
        self.ranks, self.queue = ranks, queue
        self.now: dict[str, Times] = {
            lane: np.zeros(ranks) for lane in (MAIN, AHEAD, URGENT, INPUT)
        }
        self.step = Step(0, np.zeros(ranks), np.zeros(ranks))
        self._wire = np.zeros(ranks)  # busy until then with what is urgent or blocks
        self._beside: list[Beside] = []  # what the lanes do in this step
        self._bulk: list[tuple[Times, Times]] = []  # transfers of the lane `ahead` in this step
        # until the main thread waits for it
        self._taken: dict[str, list[Meeting]] = {lane: [] for lane in (AHEAD, URGENT, INPUT)}

    # ---- steps

    def begin_step(self, number: int) -> None:
        self.step = Step(number, self.now[MAIN].copy(), self.now[MAIN].copy())

    def end_step(self) -> Step:
        self.step.end = self.now[MAIN].copy()
        return self.step

    def submit(self, lane: str) -> None:
        """The main thread gives a lane its next job: it begins when both are there."""
        self.now[lane] = np.maximum(self.now[lane], self.now[MAIN])
        if lane == AHEAD:
            self._beside, self._bulk = [], []

    # ---- verbs

    def work(self, name: str, seconds: Times | float, lane: str = MAIN, part: float = 1.0) -> None:
        """Work of a lane. On a side lane it takes the device from the compute; `part` of it is not
        hidden behind the lane's own transfers (pieces are sent while others are worked on)."""
        begin = self.now[lane]
        self.now[lane] = begin + part * np.asarray(seconds)
        if lane != MAIN:
            self._add(Beside(begin, begin + np.asarray(seconds), 0.0))
        self.step.spans.append(
            (name if lane == MAIN else f"{lane}/{name}", begin, begin + np.asarray(seconds))
        )

    def copy(self, name: str, seconds: Times, lane: str) -> None:
        """Copies of a lane between host and device: copy engines leave the compute alone."""
        begin = self.now[lane]
        self.now[lane] = begin + seconds
        self.step.spans.append(
            (name if lane == MAIN else f"{lane}/{name}", begin, self.now[lane].copy())
        )

    def compute(self, name: str, seconds: Times) -> None:
        """Forward or backward on the main thread, slowed down by what the lanes do meanwhile."""
        begin = self.now[MAIN]
        self.now[MAIN] = slow_down(begin, seconds, self._beside)
        self.step.spans.append((name, begin, self.now[MAIN]))

    def meet(
        self,
        kind: str,
        path: str,
        sent: PerRank,
        received: PerRank,
        seconds: Times | float,
        lane: str = MAIN,
        *,
        slowdown: float = 1.0,
        overtakes: bool = False,
    ) -> Meeting:
        """A collective that its lane waits for. `slowdown`: of compute beside it; `overtakes`: goes
        before bulk traffic."""
        issued = self.now[lane]
        begin = np.full(self.ranks, issued.max())
        cost = np.broadcast_to(np.asarray(seconds, np.float64), begin.shape)
        done = self._transmit(begin, cost, lane, overtakes)
        meeting = Meeting(kind, path, sent, received, issued, issued, done)
        self.now[lane] = done
        if lane == MAIN:
            self.step.meetings.append(meeting)
        else:
            self._taken[lane].append(meeting)
            if slowdown > 1:
                self._add(Beside(begin, done, 1 / slowdown))
        return meeting

    def tell(
        self,
        kind: str,
        path: str,
        sent: PerRank,
        received: PerRank,
        seconds: Times | float,
        lane: str,
    ) -> None:
        """A collective of the host that its lane waits for: so small that the network does not feel
        it."""
        issued = self.now[lane]
        done = np.full(self.ranks, issued.max()) + np.asarray(seconds)
        self._taken[lane].append(Meeting(kind, path, sent, received, issued, issued, done))
        self.now[lane] = done

    def _add(self, beside: Beside) -> None:
        self._beside.append(beside)
        self._beside.sort(key=lambda one: float(one.begin.mean()))

    def issue(
        self, kind: str, path: str, sent: PerRank, received: PerRank, seconds: Times | float
    ) -> Meeting:
        """A collective of the main thread that nobody waits for yet."""
        issued = self.now[MAIN]
        done = np.full(self.ranks, issued.max()) + np.asarray(seconds)
        return Meeting(kind, path, sent, received, issued.copy(), issued.copy(), done)

    def send(
        self,
        kind: str,
        path: str,
        sent: PerRank,
        received: PerRank,
        seconds: Times,
        *,
        after: Meeting | None,
        slowdown: float,
    ) -> Meeting:
        """The same over the network, once `after` is over; the compute that it overlaps is slowed
        down."""
        issued = self.now[MAIN]
        begin = np.full(self.ranks, issued.max())
        if after is not None:
            begin = np.maximum(begin, after.done)
        done = self._transmit(begin, seconds, MAIN, False)
        if slowdown > 1:
            self._add(Beside(begin, done, 1 / slowdown))
        return Meeting(kind, path, sent, received, issued.copy(), issued.copy(), done)

    def wait(self, meeting: Meeting | None) -> None:
        """The main thread needs its result."""
        if meeting is None:
            return
        meeting.waited = self.now[MAIN].copy()
        meeting.done = np.maximum(meeting.done, meeting.waited)
        self.now[MAIN] = meeting.done.copy()
        self.step.meetings.append(meeting)

    def arrive(self, span: str = "arrive", lanes: Sequence[str] = (AHEAD, URGENT)) -> None:
        """The main thread waits for what the lanes did; of each of their collectives, the part in
        this wait stopped it."""
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
        """When it has arrived. Two that use the network at once have half of it each, unless one
        overtakes; what already stands in the card's queue is not overtaken by anything."""
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
        # What is bulk is over so much later.
        late = np.where(bulk > 0, cost, 0.0)
        self.now[AHEAD] = self.now[AHEAD] + late
        self._bulk = [(start, end + late) for start, end in self._bulk]
        return done


def slow_down(begin: Times, seconds: Times, beside: list[Beside]) -> Times:
    """When `seconds` of compute are done that begin at `begin`, at the speed that what is beside it
    leaves."""
    now, left = begin.astype(np.float64), np.asarray(seconds, np.float64).copy()
    for one in beside:  # in the order in which they begin; where two overlap, the first one counts
        before = np.minimum(left, np.maximum(one.begin - now, 0.0))
        now, left = now + before, left - before
        busy = left > 0
        lasting = np.where(busy, np.maximum(one.end - np.maximum(now, one.begin), 0.0), 0.0)
        done = np.minimum(left, lasting * one.speed)
        ended = busy & (done >= left)
        now = now + np.where(ended, left / one.speed if one.speed else 0.0, lasting)
        left = left - done
    return now + left
