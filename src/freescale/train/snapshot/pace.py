"""How many steps two snapshots are apart: as many as asked for, or the least number at which they
cost a small share of training; in any case as many as one takes to complete."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from freescale.train.snapshot.choice import choose_affordable, choose_interval

BUDGET = 0.01  # of training, for snapshots
_FIRST = 10  # steps between the first ones, where nothing is known yet

Every = int | str  # "auto", or a number
Look = dict[str, Any]  # of a rank at the last snapshot, as plain JSON


class Pace:
    """The interval of a run. It grows and does not shrink: a slow moment must not make the next
    ones slower."""

    def __init__(self, asked: Every) -> None:
        self.asked = asked
        self.interval = asked if isinstance(asked, int) else _FIRST
        self._told = not isinstance(asked, int)  # what the interval costs
        self._last: tuple[int, float] | None = None  # the last look: step, time

    def look(self, step: int, busy: bool, seconds: float, processor: float) -> Look:
        """What this rank makes of the last snapshot.

        Args:
            step: that was made last.
            busy: whether a snapshot is under way.
            seconds: that the last one took, with its copy; 0 if that says nothing.
            processor: of which its threads computed.
        """
        now, per_step = time.perf_counter(), 0.0
        if self._last is not None and step > self._last[0]:
            per_step = (now - self._last[1]) / (step - self._last[0])
        self._last = step, now
        least = choose_interval(self.interval, seconds, per_step)
        if not isinstance(self.asked, int):
            least = choose_affordable(least, processor, per_step, BUDGET)
        share = processor / per_step if per_step else 0.0
        return {"busy": busy, "seconds": seconds, "steps": least, "per_snapshot": share}

    def agree(self, looks: Sequence[Look]) -> dict[str, Any] | None:
        """Of all ranks. Returns a line for the log if there is something to tell: under
        `snapshot_interval`, that the interval grows; under `snapshot_cost`, once, that the one
        which was asked for costs more than the budget."""
        least = max(each["steps"] for each in looks)
        grows, self.interval = least > self.interval, max(least, self.interval)
        share = max(each["per_snapshot"] for each in looks) / self.interval
        about = {
            "steps": self.interval,
            "asked": self.asked,
            "seconds": round(max(each["seconds"] for each in looks), 3),
            "percent": round(100 * share, 2),
        }
        if grows:
            return {"snapshot_interval": about}
        if share > BUDGET and not self._told:
            self._told = True
            return {"snapshot_cost": about}
        return None
