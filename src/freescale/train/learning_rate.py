"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable


def build_learning_rate(warmup: int, decay: str, total: int) -> Callable[[int], float]:
    """step (from 1) -> factor: linear warm-up over `warmup` steps, then constant, or linear or
    cosine decay to 0 at `total`."""
    if decay not in ("constant", "linear", "cosine"):
        raise ValueError(f"decay must be constant, linear or cosine, not {decay!r}")

    def factor(step: int) -> float:
        if step <= warmup:
            return step / max(warmup, 1)
        if decay == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return 1.0 - done if decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))

    return factor
