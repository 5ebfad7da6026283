"""Turns a trace into what the report's timeline draws: a few steps, lanes per rank, and the bubbles
in the compute. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from freescale.ledger.trace import COMMUNICATION_LANE, COMPUTE_LANE, LANES
from freescale.ledger.waits import split_wait

STEPS, RANKS = 8, 16  # at most on the page: it stays small whatever the run was
_ROWS = 4  # of a lane, where events overlap
_SHORTEST = 0.05  # microseconds: a shorter bubble is not drawn


@dataclass
class _Event:
    """Something to draw."""

    rank: int
    lane: int
    name: str
    begin: float
    duration: float
    more: dict[str, Any]
    row: int = 0  # in its lane

    @property
    def end(self) -> float:
        return self.begin + self.duration

    def to_list(self, origin: float) -> list[Any]:
        begin, duration = round(self.begin - origin, 1), round(self.duration, 1)
        return [self.rank, LANES[self.lane], self.row, self.name, begin, duration, self.more]


@dataclass
class _Step:
    """A step of one rank, in the order of the trace, which is that of the ledger."""

    begin: float
    end: float
    spans: list[_Event] = field(default_factory=list)
    transfers: list[_Event] = field(default_factory=list)


def build_timeline(events: Iterable[Mapping[str, Any]], slowest: int = 0) -> dict[str, Any] | None:
    """Chooses and arranges what static/timeline.js draws of a trace's events; the rank `slowest` is
    always shown. None without steps.

    Else, with times in microseconds since the first step shown: `steps`: [number, begin, end] of
    each; `pick`: the place of the first of two typical ones; `starts`: [ranks][steps]; `lanes`:
    [name, rows]; `events`: [rank, lane, row, name, begin, duration, more], where `more` says what
    is known: bytes `sent` and `received`, `path`, `wait`, and for a bubble `for`, the kind of the
    collective; `ranks`: those shown, out of `of`; `traced`: steps in the trace.
    """
    ranks = _parse_steps(events)
    numbers = sorted(set.intersection(*map(set, ranks.values()))) if ranks else []
    if not numbers:
        return None
    edges = [
        (
            min(steps[number].begin for steps in ranks.values()),
            max(steps[number].end for steps in ranks.values()),
        )
        for number in numbers
    ]
    shown, pick = _choose_steps(edges)
    begin, end = edges[shown.start][0], edges[shown.stop - 1][1]
    chosen = choose_ranks(sorted(ranks), RANKS, slowest)
    drawn = [
        event
        for event in _list_events(ranks, numbers)
        if event.rank in chosen and event.begin < end and event.end > begin
    ]
    rows = _assign_rows(drawn)
    return {
        "ranks": chosen,
        "of": len(ranks),
        "lanes": [[name, rows[lane]] for lane, name in enumerate(LANES) if lane in rows],
        "steps": [
            [numbers[place], *(round(edge - begin, 1) for edge in edges[place])] for place in shown
        ],
        "starts": [
            [round(ranks[rank][numbers[place]].begin - begin, 1) for place in shown]
            for rank in chosen
        ],
        "pick": pick - shown.start,
        "traced": len(numbers),
        "events": [event.to_list(begin) for event in drawn],
    }


def choose_ranks(ranks: Sequence[int], limit: int, slowest: int) -> list[int]:
    """Chooses at most `limit` ranks, evenly spread, the slowest among them."""
    if len(ranks) <= limit:
        return list(ranks)
    spread = [ranks[place * len(ranks) // (limit - 1)] for place in range(limit - 1)]
    return sorted({*spread, slowest})


def _parse_steps(events: Iterable[Mapping[str, Any]]) -> dict[int, dict[int, _Step]]:
    """The steps of a trace, by rank and number."""
    ranks: dict[int, dict[int, _Step]] = {}
    current: dict[int, _Step] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        rank, lane, begin, duration = event["pid"], event["tid"], event["ts"], event["dur"]
        word, _, number = event["name"].partition(" ")
        if lane == COMPUTE_LANE and word == "step" and number.isdigit():
            current[rank] = _Step(begin, begin + duration)
            ranks.setdefault(rank, {})[int(number)] = current[rank]
        elif rank not in current:
            continue  # of a step that is not in the file
        elif lane == COMMUNICATION_LANE:
            thread, more = _describe_transfer(event.get("args", {}))
            transfer = _Event(rank, thread, event["name"], begin, duration, more)
            current[rank].transfers.append(transfer)
        else:
            current[rank].spans.append(_Event(rank, lane, event["name"], begin, duration, {}))
    return ranks


def _choose_steps(edges: Sequence[tuple[float, float]]) -> tuple[range, int]:
    """Which steps are on the page, and the first of a pair among them of median duration.

    `edges`: begin and end of each step, over all ranks.
    """
    first = min(2, max(0, len(edges) - 2))  # the first two are warm-up
    durations = [edges[place + 1][1] - edges[place][0] for place in range(first, len(edges) - 1)]
    pick = first + durations.index(statistics.median_low(durations)) if durations else first
    start = max(first, min(pick - STEPS // 2 + 1, len(edges) - STEPS))
    return range(start, min(start + STEPS, len(edges))), pick


def _list_events(ranks: Mapping[int, Mapping[int, _Step]], numbers: Sequence[int]) -> list[_Event]:
    """All events to draw, by rank, lane and time; of events that begin together, the longer
    first."""
    steps = [[of_rank[number] for of_rank in ranks.values()] for number in numbers]
    events = [
        event for of_step in steps for step in of_step for event in (*step.spans, *step.transfers)
    ]
    for of_step in steps:
        events += _find_bubbles([step.transfers for step in of_step])
    return sorted(events, key=lambda e: (e.rank, e.lane, e.begin, -e.duration))


def _describe_transfer(about: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """The lane of a transfer, and what is known about it, from the arguments of its event."""
    thread = about.get("lane") or ""
    lane = LANES.index(thread) if thread in LANES else COMMUNICATION_LANE
    return lane, {
        "sent": about.get("sent_bytes"),
        "received": about.get("received_bytes"),
        "wait": about.get("wait_us"),
        "path": about.get("path") or "not recorded",
    }


def _find_bubbles(transfers: Sequence[Sequence[_Event]]) -> list[_Event]:
    """The waits in the compute of one step, each split into straggler time and exposed
    communication. `transfers`: of each rank."""
    bubbles: list[_Event] = []
    if len({len(of_rank) for of_rank in transfers}) > 1:
        return bubbles  # a truncated file does not show who waited for whom
    for meeting in zip(*transfers, strict=True):
        last_arrival = max(transfer.begin for transfer in meeting)
        for transfer in meeting:
            begin = transfer.end - (transfer.more["wait"] or 0.0)
            parts = split_wait(begin, transfer.end, last_arrival)
            for name, duration in parts._asdict().items():
                if duration > _SHORTEST:
                    more = {"for": transfer.name}
                    bubble = _Event(transfer.rank, COMPUTE_LANE, name, begin, duration, more)
                    bubbles.append(bubble)
                begin += duration
    return bubbles


def _assign_rows(events: Sequence[_Event]) -> dict[int, int]:
    """Sets the row of each event in the lanes of communication, with little overlap. Returns the
    number of rows of each lane."""
    rows = {COMPUTE_LANE: 1}
    free: dict[tuple[int, int], list[float]] = {}  # when each row of a rank's lane is free again
    for event in events:
        if event.lane == COMPUTE_LANE:
            continue
        ends = free.setdefault((event.rank, event.lane), [])
        row = next((place for place, end in enumerate(ends) if end <= event.begin), None)
        if row is None:
            row = min(len(ends), _ROWS - 1)
            ends.extend([0.0] * (row + 1 - len(ends)))
        ends[row] = max(ends[row], event.end)
        event.row = row
        rows[event.lane] = max(rows.get(event.lane, 1), row + 1)
    return rows
