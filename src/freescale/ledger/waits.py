"""How a wait for a collective is divided. Pure functions over plain data.

These definitions of straggler time and exposed communication hold for training, benchmarks,
TorchRec runs and the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from freescale.ledger.record import CollectiveRecord

Interval = tuple[int, int]  # begin and end


class SplitWait(NamedTuple):
    """The two parts of a wait, in the unit of its times."""

    straggler: float
    exposed: float


def split_wait(begin: float, end: float, last_arrival: float) -> SplitWait:
    """Splits the wait [begin, end) of one rank at the moment when the last rank arrived.

    Before that moment the rank waits for a slower rank; after it, for bytes that nothing hides.

        this rank   forward ---->|<--------- wait --------->|----> backward
                               begin                       end
        last rank   forward ----------->|<----- wait ------>|----> backward
                                  last_arrival
                                 |<---->|<----------------->|
                                straggler      exposed

    A last rank that arrived before `begin` makes the whole wait exposed, one that arrived after
    `end` (clocks of two hosts differ a little) makes all of it straggler time.
    """
    split = min(max(begin, last_arrival), end)
    return SplitWait(split - begin, end - split)


def assign_waits(collectives: Sequence[CollectiveRecord]) -> list[list[Interval]]:
    """Assigns every waiting moment of a rank to one collective: the intervals of each, in the order
    of time. If several threads of a rank wait at once, the moment belongs to the collective that is
    done last, so that none is counted twice."""
    waits = sorted(
        (collective.waited, collective.done, number)
        for number, collective in enumerate(collectives)
        if collective.done > collective.waited
    )
    intervals: list[list[Interval]] = [[] for _ in collectives]
    # Overlaps are rare: without one, each wait belongs to its collective.
    if all(before[1] <= after[0] for before, after in zip(waits[:-1], waits[1:], strict=True)):
        for begin, end, number in waits:
            intervals[number].append((begin, end))
        return intervals
    taken: list[Interval] = []
    for begin, end, number in sorted(waits, key=lambda wait: (-wait[1], wait[0], wait[2])):
        intervals[number] = _subtract(begin, end, taken)
        taken = sorted([*taken, *intervals[number]])
    return intervals


def _subtract(begin: int, end: int, taken: Sequence[Interval]) -> list[Interval]:
    """The parts of [begin, end) outside `taken`, whose intervals are sorted and disjoint."""
    left: list[Interval] = []
    for taken_begin, taken_end in taken:
        if begin < min(taken_begin, end):
            left.append((begin, min(taken_begin, end)))
        begin = max(begin, taken_end)
    return [*left, (begin, end)] if begin < end else left
