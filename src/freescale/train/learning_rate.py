"""The learning rate over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable

DECAYS = ("constant", "linear", "cosine", "trapezoid")
_FALLING = 0.3  # share of the steps that a trapezoid ends with


def build_learning_rate(warmup: int, decay: str, total: int) -> Callable[[int], float]:
    """step (from 1) -> factor: linear warm-up over `warmup` steps, then constant, or decay to 0 at
    `total`: linear, cosine, or as a trapezoid, linear over the last 30 % of the steps."""
    if decay not in DECAYS:
        raise ValueError(f"decay must be one of {', '.join(DECAYS)}, not {decay!r}")

    def factor(step: int) -> float:
        if step <= warmup:
            return step / max(warmup, 1)
        if decay == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        if decay == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        return min(1.0, (1.0 - done) / (_FALLING if decay == "trapezoid" else 1.0))

    return factor
