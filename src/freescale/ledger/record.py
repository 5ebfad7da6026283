"""What the ledger of one rank keeps of a finished step.

Between ranks and in result files a record is plain JSON, in which spans and collectives are lists
in the order of the fields below. `StepRecord.parse` gives them their names back. Times are
nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# Kinds of traffic, in the order in which figures list them.
KINDS = ("counts", "ids", "rows", "gradients", "samples", "attention", "dense")


class Span(NamedTuple):
    """A named stage of the step; stages of another thread are called `thread/name`."""

    name: str
    begin: int
    end: int


class CollectiveRecord(NamedTuple):
    """A finished collective. Its wait is [waited, done), and empty if the result was there."""

    kind: str  # one of KINDS
    sent: int  # bytes
    received: int  # bytes
    issued: int  # this rank arrived at the collective
    waited: int  # compute stopped for the result
    done: int  # the result was there


class Carrier(NamedTuple):
    """Which thread waited for a collective, and what carried it."""

    thread: str | None  # empty for the main thread; None if not recorded
    path: str | None


@dataclass(frozen=True)
class StepRecord:
    step: int
    begin: int
    end: int
    spans: list[Span]
    collectives: list[CollectiveRecord]
    carriers: list[Carrier]  # one per collective
    busy: Mapping[str, int]  # main thread's time by span, without waits
    lane_wait: int  # wait of the main thread for this rank's other threads
    paths: Mapping[str, Mapping[str, int]]  # bytes sent, by kind and by what carried them
    counters: Mapping[str, float]

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> StepRecord:
        """Parses a record of `Ledger.drain`, JSON or the simulator, which leaves parts out."""
        collectives = [CollectiveRecord(*entry) for entry in plain["collectives"]]
        unknown = [(None, None)] * len(collectives)
        return cls(
            step=plain["step"],
            begin=plain["begin"],
            end=plain["end"],
            spans=[Span(*entry) for entry in plain["spans"]],
            collectives=collectives,
            carriers=[Carrier(*entry) for entry in plain.get("carriers", unknown)],
            busy=plain.get("busy", {}),
            lane_wait=plain.get("lanes", 0),
            paths=plain.get("paths", {}),
            counters=plain["counters"],
        )


def shift_clock(plain: Mapping[str, Any], offset: int) -> dict[str, Any]:
    """A plain record with its times moved by `offset`, to the clock of rank 0."""
    return {
        **plain,
        "begin": plain["begin"] + offset,
        "end": plain["end"] + offset,
        "spans": [[name, begin + offset, end + offset] for name, begin, end in plain["spans"]],
        "collectives": [
            [kind, sent, received, *(time + offset for time in times)]
            for kind, sent, received, *times in plain["collectives"]
        ],
    }


def sum_paths(sent: Iterable[tuple[str, str, int]]) -> dict[str, dict[str, int]]:
    """Adds up bytes by kind and by what carried them, from (kind, path, bytes)."""
    paths: dict[str, dict[str, int]] = {}
    for kind, path, size in sent:
        of_kind = paths.setdefault(kind, {})
        of_kind[path] = of_kind.get(path, 0) + size
    return paths
