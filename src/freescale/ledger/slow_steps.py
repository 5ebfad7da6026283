"""Steps that took much longer than those before them, and what they waited for. Pure Python over
the figures of steps (merge.py)."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

_HISTORY = 100  # earlier steps for comparison
_ENOUGH = 10  # steps before the first comparison
_TIMES = 3.0  # a slow step takes this many times the usual time
_MORE_MS = 1000.0  # and at least this much more: short steps vary
_KEPT = 20  # slow steps in ledger.json


class SlowSteps:
    """Finds slow steps, one step at a time."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=_HISTORY)
        self._fresh: list[dict[str, Any]] = []
        self.found: list[dict[str, Any]] = []  # the slowest of the run, in order

    def add(self, figures: Mapping[str, Any]) -> None:
        """Adds the figures of the next step."""
        lasts = figures["step_ms"]
        if len(self._before) >= _ENOUGH:
            usual = statistics.median(self._before)
            if lasts > max(_TIMES * usual, usual + _MORE_MS):
                slow = {"seconds": lasts / 1e3, "usual": usual / 1e3, "why": explain(figures)}
                # steps are counted from 0 here, and from 1 elsewhere
                self._fresh.append({"step": figures["step"] + 1, "slow_step": slow})
        self._before.append(lasts)

    def take(self) -> list[dict[str, Any]]:
        """Returns the slowest found since the last call: one warning is enough."""
        fresh, self._fresh = self._fresh, []
        slowest = sorted([*self.found, *fresh], key=_get_seconds)[-_KEPT:]
        self.found = sorted(slowest, key=lambda entry: int(entry["step"]))
        return [max(fresh, key=_get_seconds)] if fresh else []


def explain(figures: Mapping[str, Any]) -> str:
    """What a step waited for and which rank caused it, from its line of ledger.jsonl."""
    straggler, exposed = figures["straggler_ms"], figures["exposed_ms"]
    ranks = len(straggler)
    busy, late = _find_work(figures["busy_ms"], straggler)
    parts = {
        "straggler": sum(straggler) / max(1, ranks - 1),
        "exposed": sum(exposed.values()),
        "lanes": max(figures["lane_ms"]),
        "work": max((values[late] for values in figures["busy_ms"].values()), default=0.0),
    }
    # Others wait while one works: their wait is what it costs.
    waits = [name for name in parts if name != "work" and parts[name] > figures["step_ms"] / 2]
    largest = max(waits or parts, key=lambda name: parts[name])
    seconds = parts[largest] / 1e3
    if largest == "straggler" and ranks > 1:
        return f"the other ranks waited {seconds:.2f} s for rank {late}{busy}"
    if largest == "exposed":
        kind = max(exposed, key=lambda name: float(exposed[name]))
        worst = figures["exposed_ms_per_rank"].index(max(figures["exposed_ms_per_rank"]))
        return f"{seconds:.2f} s of waiting for {kind} on their way, longest on rank {worst}"
    if largest == "lanes":
        rank = figures["lane_ms"].index(parts["lanes"])
        return f"rank {rank} waited {seconds:.2f} s for its own lanes"
    return f"rank {late} worked{busy}"


def _find_work(busy: Mapping[str, Sequence[float]], straggler: Sequence[float]) -> tuple[str, int]:
    """The longest span of the rank that waited least, as text, and that rank."""
    late = straggler.index(min(straggler))
    if not busy:
        return "", late
    name = max(busy, key=lambda span: busy[span][late])
    return f" ('{name}' for {busy[name][late] / 1e3:.2f} s)", late


def _get_seconds(entry: Mapping[str, Any]) -> float:
    return float(entry["slow_step"]["seconds"])
