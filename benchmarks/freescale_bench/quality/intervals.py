"""From ranks to figures: hits and gains per user, means over seeds with their intervals, and a
bootstrap over users. Pure functions of arrays."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

CUTOFF = 10
METRICS = (f"hr@{CUTOFF}", f"ndcg@{CUTOFF}")
RESAMPLES = 2000
# 97.5 % of Student's t, by degrees of freedom, from 1
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL = 1.959964  # 97.5 % of the normal distribution


def measure_users(ranks: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
    """Ranks [users], 1 is best -> each user's contribution to HR@10 and NDCG@10, [users]."""
    hit = ranks <= CUTOFF
    gain = np.where(hit, 1 / np.log2(ranks.astype(np.float64) + 1), 0.0)
    return dict(zip(METRICS, (hit.astype(np.float64), gain), strict=True))


def find_student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL  # first terms of its expansion around the normal distribution
    first = (z**3 + z) / (4 * freedom)
    return z + first + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Returns the mean over seeds and, for several seeds, its 95 % interval."""
    mean = statistics.fmean(values)
    summary: dict[str, Any] = {"mean": mean, "values": list(values)}
    if len(values) > 1:
        freedom = len(values) - 1
        half = find_student(freedom) * statistics.stdev(values) / len(values) ** 0.5
        summary |= {"low": mean - half, "high": mean + half}
    return summary


def bootstrap_relative(
    ours: NDArray[Any], theirs: NDArray[Any], resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, float]:
    """Returns the relative difference of two means over the same users, with an interval.

    Users are drawn with replacement, each with the values of both models.

    Args:
        ours: [users]; means over seeds.
        theirs: [users], in the same order.
        resamples: number of draws.
        seed: of the draws.

    Returns:
        percent, low and high (95 %), and the number of users.
    """
    random, users, found = np.random.default_rng(seed), len(ours), []
    for _ in range(resamples):
        drawn = random.integers(0, users, users)
        found.append(compare_means(ours[drawn], theirs[drawn]))
    low, high = np.percentile(found, [2.5, 97.5], method="inverted_cdf")
    return {
        "percent": compare_means(ours, theirs),
        "low": float(low),
        "high": float(high),
        "users": users,
    }


def compare_means(ours: NDArray[Any] | Sequence[float], theirs: Any) -> float:
    """Returns how much larger our mean is, in percent; infinite if theirs is 0."""
    own, other = float(np.mean(ours)), float(np.mean(theirs))
    return 100 * (own / other - 1) if other else float("inf")
