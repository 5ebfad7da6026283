"""How many steps apart snapshots are: as many as the user sets, or as few as cost a small share of
training; in any case as many as one takes to complete."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

BUDGET = 0.01  # of training, for snapshots and the marks of changed rows
_OF_SNAPSHOTS = 0.5  # share of the budget; marks cost about as much
WINDOW = 6  # steps that feel a snapshot: its copy, its thread, caches that it has emptied
_FIRST = 10  # steps between the first ones, when nothing is known yet
_GROWS_BY = 1.25  # at least, with auto: more steps change more rows, so that a snapshot costs more

Every = int | str  # "auto", or a number
Look = dict[str, Any]  # of a rank at the last snapshot, as plain JSON


class StepCosts:
    """What a snapshot costs: the additional processor time of this process in the steps after it.
    Wall time would count whatever else the machine does."""

    def __init__(self) -> None:
        self._before = time.process_time()
        self._usual: deque[float] = deque(maxlen=50)
        self._window: list[float] | None = None  # of the steps since the last snapshot
        self._counts = False  # whether that snapshot is a usual one
        self._costs: deque[float] = deque(maxlen=3)

    def note_step(self) -> None:
        """After every step."""
        now = time.process_time()
        spent, self._before = now - self._before, now
        if self._window is None:
            self._usual.append(spent)
            return
        self._window.append(spent)
        if len(self._window) == WINDOW:
            if self._usual and self._counts:
                usual = statistics.median(self._usual)
                self._costs.append(sum(self._window) - WINDOW * usual)
            self._window = None

    def note_snapshot(self, usual: bool) -> None:
        """A snapshot begins; `usual`: it costs what most do."""
        self._window, self._counts = [], usual

    def estimate(self) -> float:
        """Processor seconds of a snapshot, by the last ones; 0 if nothing is known."""
        return max(0.0, statistics.median(self._costs)) if self._costs else 0.0


class Pace:
    """The interval of a run. It only grows: a slow moment must not make the next ones slower."""

    def __init__(self, requested: Every) -> None:
        self.requested = requested
        self.interval = requested if isinstance(requested, int) else _FIRST
        self._reported = not isinstance(requested, int)  # what the interval costs
        self._last: tuple[int, float] | None = None  # the last look: step, time
        self._fastest = 0.0  # seconds of a step, without other work between two looks

    def look(self, step: int, busy: bool, seconds: float, processor: float) -> Look:
        """How this rank judges the last snapshot, after `step`. `busy`: one is in progress;
        `seconds` of the last, with its copy, 0 if it was no usual one; its `processor` seconds."""
        now, per_step = time.perf_counter(), 0.0
        if self._last is not None and step > self._last[0]:
            per_step = (now - self._last[1]) / (step - self._last[0])
            self._fastest = min(per_step, self._fastest or per_step)
        self._last = step, now
        least = choose_interval(self.interval, seconds, per_step)
        if not isinstance(self.requested, int):
            least = choose_affordable(least, processor, self._fastest, _OF_SNAPSHOTS * BUDGET)
        steps = processor / self._fastest if self._fastest else 0.0
        return {"busy": busy, "seconds": seconds, "steps": least, "cost_in_steps": steps}

    def agree(self, looks: Sequence[Look]) -> dict[str, Any] | None:
        """Applies the looks of all ranks. Returns a line for the log or None: `snapshot_interval`,
        the interval grows; `snapshot_cost`, once, the requested one costs more than the budget."""
        least = max(each["steps"] for each in looks)
        grows = least > self.interval
        if grows and not isinstance(self.requested, int):
            least = max(least, math.ceil(_GROWS_BY * self.interval))
        self.interval = max(least, self.interval)
        share = max(each["cost_in_steps"] for each in looks) / self.interval
        about = {
            "steps": self.interval,
            "asked": self.requested,
            "seconds": round(max(each["seconds"] for each in looks), 3),
            "percent": round(100 * share, 2),
        }
        if grows:
            return {"snapshot_interval": about}
        if share > BUDGET and not self._reported:
            self._reported = True
            return {"snapshot_cost": about}
        return None


def choose_interval(shortest: int, snapshot_seconds: float, step_seconds: float) -> int:
    """The least number of steps between two snapshots at which one is complete, with its copy,
    before the next is due; at least `shortest`."""
    if step_seconds <= 0:
        return shortest
    return max(shortest, math.ceil(snapshot_seconds / step_seconds))


def choose_affordable(
    least: int, processor_seconds: float, step_seconds: float, budget: float
) -> int:
    """The least number of steps between two snapshots at which `processor_seconds` of one are
    within `budget`, a share of the time of these steps; at least `least`."""
    if step_seconds <= 0:
        return least
    return max(least, math.ceil(processor_seconds / (budget * step_seconds)))
