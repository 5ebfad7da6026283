"""The figures of a run, from the figures of its steps. Pure Python over plain data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from freescale.ledger.trace import rename_lane

# Figures that not every step has.
_OPTIONAL = (
    "collision_percent",
    "sparsity",
    "predicted_imbalance_before",
    "predicted_imbalance",
    "moved_tokens_percent",
    "cost_error_percent",
    "dense_sent_percent",
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


class Summary:
    """Averages the figures of a run's steps.

    Memory is constant but for one number per step, which the median of the step time needs.

    Args:
        ranks: Ranks of the run. A resumed run may have had another number before: such steps are
            counted, but not averaged, since nothing about them holds for this number.
        warmup: First steps, which allocate and connect: they are counted, but not averaged.
    """

    def __init__(self, ranks: int, warmup: int = 2) -> None:
        self.ranks = ranks
        self.warmup = warmup
        self._seen = self._own = 0  # steps: all, and those on `ranks` ranks
        self._elsewhere: dict[int, int] = {}  # steps on other numbers of ranks
        self._busy_steps = self._path_steps = 0
        self._step_ms: list[float] = []
        self._sums: dict[str, float] = {}
        self._rank_sums: dict[str, list[float]] = {}
        self._counts: dict[str, int] = {}

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
        for group in ("exposed_ms", "bytes"):
            flat |= {f"{group}/{name}": value for name, value in figures[group].items()}
        # A resumed run reads lines of an earlier version.
        flat |= {f"spans_ms/{rename_lane(name)}": v for name, v in figures["spans_ms"].items()}
        for kind, by_path in figures.get("paths", {}).items():
            flat |= {f"paths/{kind}/{path}": sent for path, sent in by_path.items()}
        for name, value in flat.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1
        for name in ("compute_ms", "straggler_ms", "exposed_ms_per_rank", "lane_ms"):
            self._add_per_rank(name, figures.get(name))
        for name, values in figures.get("busy_ms", {}).items():
            self._add_per_rank(f"busy_ms/{name}", values)
        # Lines of an older version lack them.
        self._busy_steps += "busy_ms" in figures
        self._path_steps += "paths" in figures

    def _add_per_rank(self, name: str, values: Sequence[float] | None) -> None:
        if values is None:  # a line of an older version
            return
        totals = self._rank_sums.setdefault(name, [0.0] * self.ranks)
        for rank, value in enumerate(values):
            totals[rank] += value
        self._counts[name] = self._counts.get(name, 0) + 1

    def _average_per_rank(self, name: str) -> list[float]:
        return [total / self._counts[name] for total in self._rank_sums.get(name, [])]

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

        def select(prefix: str) -> dict[str, float]:
            return {n.split("/", 1)[1]: v for n, v in means.items() if n.startswith(f"{prefix}/")}

        exposed = select("exposed_ms")
        paths: dict[str, dict[str, float]] = {}
        for name, sent in self._sums.items():
            if name.startswith("paths/"):
                _, kind, path = name.split("/", 2)
                # Over all steps, like `bytes_per_step`: the last ones have no samples to move.
                paths.setdefault(kind, {})[path] = sent / self._path_steps
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
            "compute_ms_per_rank": self._average_per_rank("compute_ms"),
            "straggler_ms_per_rank": self._average_per_rank("straggler_ms"),
            "exposed_ms_per_rank": self._average_per_rank("exposed_ms_per_rank"),
            "lane_ms_per_rank": self._average_per_rank("lane_ms"),
            # Over all measured steps: with the waits it adds up to the step.
            "busy_ms_per_rank": {
                name.split("/", 1)[1]: [total / self._busy_steps for total in totals]
                for name, totals in self._rank_sums.items()
                if name.startswith("busy_ms/")
            },
        }
