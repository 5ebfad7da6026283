"""From a trace to what the report's timeline draws: a few steps, lanes per rank, and the bubbles in
the compute. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from freescale.ledger.trace import LANES, rename_lane

STEPS, RANKS = 8, 16  # at most on the page: it stays small whatever the run was
_COMPUTE, _COMMUNICATION = 0, 1
_ROWS = 4  # of a lane, where things overlap


def timeline(events: Iterable[Mapping], slowest: int = 0) -> dict[str, Any] | None:
    """None without steps. Times in microseconds since the first step shown. `slowest`: a rank that
    is shown in any case.

    `steps`: [number, begin, end]; `pick`: the first of two typical ones. `events`: [rank, lane,
    row, name, begin, duration, more], where `more` says what is known: bytes `sent` and `received`,
    `path`, `wait`, and for bubbles `for`, the collective's kind.
    """
    records = _records(events)
    if not records:
        return None
    numbers = sorted(set.intersection(*(set(of_rank) for of_rank in records.values())))
    if not numbers:
        return None
    edges = {
        n: (
            min(r[n]["begin"] for r in records.values()),
            max(r[n]["end"] for r in records.values()),
        )
        for n in numbers
    }
    shown, pick = _shown([edges[n] for n in numbers])
    begin, end = edges[numbers[shown.start]][0], edges[numbers[shown.stop - 1]][1]
    ranks = chosen(sorted(records), RANKS, slowest)
    drawn = [
        e for e in _drawn(records, numbers) if e[0] in ranks and e[4] < end and e[4] + e[5] > begin
    ]
    rows = _pack(drawn)
    for event in drawn:
        event[4:6] = [round(event[4] - begin, 1), round(event[5], 1)]
    return {
        "ranks": ranks,
        "of": len(records),
        "lanes": [[name, rows[lane]] for lane, name in enumerate(LANES) if lane in rows],
        "steps": [
            [n, round(edges[n][0] - begin, 1), round(edges[n][1] - begin, 1)]
            for n in numbers[shown.start : shown.stop]
        ],
        "starts": [
            [round(records[r][n]["begin"] - begin, 1) for n in numbers[shown.start : shown.stop]]
            for r in ranks
        ],
        "pick": pick - shown.start,
        "traced": len(numbers),
        "events": [[e[0], LANES[e[1]], *e[2:]] for e in drawn],
    }


def chosen(ranks: Sequence[int], limit: int, slowest: int) -> list[int]:
    """At most `limit` ranks, evenly spread, the slowest among them."""
    if len(ranks) <= limit:
        return list(ranks)
    spread = [ranks[place * len(ranks) // (limit - 1)] for place in range(limit - 1)]
    return sorted({*spread, slowest})


def _records(events: Iterable[Mapping]) -> dict[int, dict[int, dict]]:
    """By rank and step number: begin, end, spans and collectives, in the order of the file, which
    is that of the ledger."""
    records: dict[int, dict[int, dict]] = {}
    current: dict[int, dict] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        rank, lane, begin, lasts = event["pid"], event["tid"], event["ts"], event["dur"]
        word, _, number = event["name"].partition(" ")
        if lane == _COMPUTE and word == "step" and number.isdigit():
            current[rank] = {"begin": begin, "end": begin + lasts, "spans": [], "collectives": []}
            records.setdefault(rank, {})[int(number)] = current[rank]
        elif rank not in current:
            continue  # of a step that is not in the file
        elif lane == _COMMUNICATION:
            current[rank]["collectives"].append(
                (event["name"], begin, begin + lasts, event.get("args", {}))
            )
        else:
            current[rank]["spans"].append((lane, event["name"], begin, lasts))
    return records


def _shown(edges: Sequence[tuple[float, float]]) -> tuple[range, int]:
    """Which steps are on the page, and the first of a pair among them that lasts as long as pairs
    mostly do."""
    first = min(2, max(0, len(edges) - 2))  # the first two are warm-up
    lasts = [edges[place + 1][1] - edges[place][0] for place in range(first, len(edges) - 1)]
    pick = first + lasts.index(statistics.median_low(lasts)) if lasts else first
    start = max(first, min(pick - STEPS // 2 + 1, len(edges) - STEPS))
    return range(start, min(start + STEPS, len(edges))), pick


def _drawn(records: Mapping[int, Mapping[int, dict]], numbers: Sequence[int]) -> list[list]:
    """[rank, lane, row, name, begin, duration, more] of everything, longer before shorter where
    they begin together."""
    found: list[list] = []
    for rank, steps in records.items():
        for number in numbers:
            for lane, name, begin, lasts in steps[number]["spans"]:
                found.append([rank, lane, 0, name, begin, lasts, {}])
            for name, begin, end, about in steps[number]["collectives"]:
                thread = rename_lane(about.get("lane") or "")
                lane = LANES.index(thread) if thread in LANES else _COMMUNICATION
                more = {
                    "sent": about.get("sent_bytes"),
                    "received": about.get("received_bytes"),
                    "wait": about.get("wait_us"),
                }
                found.append(
                    [
                        rank,
                        lane,
                        0,
                        name,
                        begin,
                        end - begin,
                        {**more, "path": about.get("path") or "not recorded"},
                    ]
                )
    for number in numbers:
        found += _bubbles({rank: steps[number]["collectives"] for rank, steps in records.items()})
    return sorted(found, key=lambda e: (e[0], e[1], e[4], -e[5]))


def _bubbles(collectives: Mapping[int, Sequence[tuple]]) -> list[list]:
    """A wait is split at the moment the last rank arrived, as in summary.py: straggler before it,
    exposed communication after."""
    found: list[list] = []
    if len({len(of_rank) for of_rank in collectives.values()}) > 1:
        return found  # a file that was cut: nothing can be said about who waited for whom
    for entries in zip(*collectives.values(), strict=True):
        last = max(begin for _, begin, _, _ in entries)
        for rank, (kind, _, end, about) in zip(collectives, entries, strict=True):
            waited = end - about.get("wait_us", 0.0)
            split = min(max(waited, last), end)
            for name, a, b in (("straggler", waited, split), ("exposed", split, end)):
                if b - a > 0.05:
                    found.append([rank, _COMPUTE, 0, name, a, b - a, {"for": kind}])
    return found


def _pack(drawn: Sequence[list]) -> dict[int, int]:
    """Sets the row of each event in the lanes of communication, so that little overlaps. -> rows of
    each lane."""
    rows = {_COMPUTE: 1}
    free: dict[tuple[int, int], list[float]] = {}
    for event in drawn:
        rank, lane, _, _, begin, lasts, _ = event
        if lane == _COMPUTE:
            continue
        ends = free.setdefault((rank, lane), [])
        row = next((place for place, end in enumerate(ends) if end <= begin), None)
        if row is None:
            row = min(len(ends), _ROWS - 1)
            ends.extend([0.0] * (row + 1 - len(ends)))
        ends[row] = max(ends[row], begin + lasts)
        event[2] = row
        rows[lane] = max(rows.get(lane, 1), row + 1)
    return rows
