"""Measures the collision rate of synthetic batches, and finds the mixing that meets a given rate
(see synthetic.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.data.synthetic.draws import DrawnBatch, SyntheticSource

_SAMPLE_EVENTS = 2_000_000  # calibrates on this many events first
_CLOSE = 0.002  # distance to the target at which the search stops


class CollisionCounter:
    """Counts requests of each batch that the previous batch also made."""

    def __init__(self, items: int):
        self._seen = np.zeros(items, bool)
        self._last: NDArray[Any] | None = None
        self.hits = self.total = 0

    def add(self, requests: NDArray[Any]) -> None:
        if self._last is not None:
            self.hits += int(self._seen[requests].sum())
            self.total += len(requests)
            self._seen[self._last] = False
        self._seen[requests] = True
        self._last = requests

    @property
    def rate(self) -> float | None:
        return self.hits / self.total if self.total else None


def _measure_rate(source: SyntheticSource, batches: Iterable[DrawnBatch], mixing: float) -> float:
    """Collision rate over consecutive batches."""
    collisions = CollisionCounter(source.items)
    for batch in batches:
        collisions.add(source.list_requests(batch, source.choose_items(batch, mixing)))
    return collisions.rate or 0.0


def _bisect(measure: Callable[[float], float], target: float) -> tuple[float, float]:
    """Finds where in [0, 2] an increasing function is closest to the target. Returns point and
    value."""
    low, high = 0.0, 2.0
    best = (0.0, measure(0.0))
    for _ in range(26):
        if abs(best[1] - target) <= _CLOSE:
            break
        middle = (low + high) / 2
        value = measure(middle)
        best = min(best, (middle, value), key=lambda point: abs(point[1] - target))
        low, high = (middle, high) if value < target else (low, middle)
    return best


def calibrate_mixing(source: SyntheticSource, target: float) -> float:
    """Finds the mixing that meets the target, on the first batches, or on all if that misses.

    Only the first few batches are kept; the others are drawn again for each try, so that memory
    does not grow with the file.
    """
    sample: list[DrawnBatch] = []
    while len(sample) < min(2, source.batches) or (
        len(sample) < source.batches and sum(len(batch.ranks) for batch in sample) < _SAMPLE_EVENTS
    ):
        sample.append(source.draw_batch(len(sample)))

    def measure_file(mixing: float) -> float:
        return _measure_rate(source, map(source.draw_batch, range(source.batches)), mixing)

    mixing, rate = _bisect(lambda mixing: _measure_rate(source, sample, mixing), target)
    if len(sample) < source.batches:
        rate = measure_file(mixing)
        if abs(rate - target) > 2 * _CLOSE:
            mixing, rate = _bisect(measure_file, target)
    if abs(rate - target) > 0.01:
        raise ValueError(
            f"collision {target} is out of reach: with {source.items} items and global batches of "
            f"{source.global_batch} users the nearest is {rate:.4f}; use that, or change "
            "those two"
        )
    return mixing
