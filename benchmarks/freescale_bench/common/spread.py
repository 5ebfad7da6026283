"""The spread of measured values."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile, and the number of values."""
    ordered = sorted(values)
    cuts = (
        statistics.quantiles(ordered, n=10, method="inclusive") if len(ordered) > 1 else ordered * 9
    )
    return {
        "median": statistics.median(ordered),
        "p20": cuts[1],
        "p80": cuts[7],
        "repetitions": len(ordered),
    }
