"""The figures of a run, from the figures of its steps. A pure function of plain data."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

# Figures that not every step has.
_OPTIONAL = (
    "collision_percent",
    "bytes_between_machines",
    "sparsity",
    "predicted_imbalance_before",
    "predicted_imbalance",
    "moved_tokens_percent",
    "split_samples",
    "split_parts",
    "cost_error_percent",
    "cache_miss_percent",
    "cache_bytes_up",
    "cache_bytes_down",
    "dynamic_rows",
    "dynamic_fill_percent",
    "dynamic_inserted",
    "dynamic_evicted",
    "dynamic_swept",
    "dynamic_turned_away",
    "dynamic_waiting",
)
# Figures by rank, and their names in the summary.
_BY_RANK = {
    "compute_ms": "compute_ms_per_rank",
    "straggler_ms": "straggler_ms_per_rank",
    "exposed_ms_per_rank": "exposed_ms_per_rank",
    "lane_ms": "lane_ms_per_rank",
}
# Averaged over all steps, even those that lack this span or path: work and waits add up to the
# step, and the last steps, which have no samples to move, count.
_OVER_ALL = ("busy_ms", "paths")


class Summary:
    """Averages the figures of a run's steps. Memory is constant but for one number per step, which
    the median of the step time needs.

    Counted, but not averaged, are steps on another number of ranks, which a resumed run may have
    had before, and the first ones (`warmup`), which allocate and connect.
    """

    def __init__(self, ranks: int, warmup: int = 2) -> None:
        self.ranks = ranks
        self.warmup = warmup
        self._seen = self._own = 0  # steps: all, and those on `ranks` ranks
        self._elsewhere: dict[int, int] = {}  # steps on other numbers of ranks
        self._step_ms: list[float] = []
        # by figure: its sum, for figures by rank an array [ranks], and how many steps had it
        self._sums: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()

    def add(self, figures: Mapping[str, Any]) -> None:
        """Adds the figures of the next step, from `merge_step` or a line of ledger.jsonl."""
        self._seen += 1
        if (ranks := len(figures["straggler_ms"])) != self.ranks:
            self._elsewhere[ranks] = self._elsewhere.get(ranks, 0) + 1
            return
        self._own += 1
        if self._own <= self.warmup:
            return
        self._step_ms.append(figures["step_ms"])
        flat = {k: figures[k] for k in ("straggler_percent", "imbalance", "samples", "tokens")}
        flat |= {k: figures[k] for k in _OPTIONAL if k in figures}
        for group in ("exposed_ms", "bytes", "spans_ms"):
            flat |= {f"{group}/{name}": value for name, value in figures[group].items()}
        for kind, by_path in figures.get("paths", {}).items():
            flat |= {f"paths/{kind}/{path}": sent for path, sent in by_path.items()}
        # Lines of an older version lack some of these.
        flat |= {name: np.array(figures[name]) for name in _BY_RANK if name in figures}
        for name, values in figures.get("busy_ms", {}).items():
            flat[f"busy_ms/{name}"] = np.array(values)
        for name, value in flat.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._counts.update([*flat, *(group for group in _OVER_ALL if group in figures)])

    def summarize(self) -> dict[str, Any]:
        """Means over the measured steps, as in ledger.json, and the median step time."""
        measured = len(self._step_ms)
        counted = {
            "ranks": self.ranks,
            "steps": self._seen,
            # JSON's keys are text.
            "steps_on_other_ranks": {str(r): count for r, count in self._elsewhere.items()},
            "measured_steps": measured,
        }
        if not measured:
            return counted
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        seconds = sum(self._step_ms) / 1e3

        def select(group: str) -> dict[str, Any]:
            every = self._counts[group]  # 0: each figure over the steps that have it
            return {
                name.split("/", 1)[1]: total / (every or self._counts[name])
                for name, total in self._sums.items()
                if name.startswith(f"{group}/")
            }

        exposed = select("exposed_ms")
        paths: dict[str, dict[str, float]] = {}
        for name, sent in select("paths").items():
            kind, _, path = name.partition("/")
            paths.setdefault(kind, {})[path] = sent
        return {
            **counted,
            "step_ms": {
                "mean": seconds * 1e3 / measured,
                "median": statistics.median(self._step_ms),
            },
            "samples_per_second": self._sums["samples"] / seconds,
            "tokens_per_second": self._sums["tokens"] / seconds,
            "straggler_percent": means["straggler_percent"],
            "exposed_percent": 100 * sum(exposed.values()) * measured / (seconds * 1e3),
            "exposed_ms": exposed,
            "bytes_per_step": select("bytes"),
            "paths": paths,  # bytes a step, by kind of traffic and by what carried them
            **{name: means.get(name) for name in _OPTIONAL},
            "imbalance": means["imbalance"],
            "spans_ms": select("spans_ms"),
            **{
                key: means[name].tolist() if name in means else [] for name, key in _BY_RANK.items()
            },
            "busy_ms_per_rank": {name: each.tolist() for name, each in select("busy_ms").items()},
        }
