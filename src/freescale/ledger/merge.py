"""Merges the records of all ranks into the figures of a step. Pure functions over plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from freescale.ledger.record import KINDS, StepRecord, sum_paths
from freescale.ledger.waits import assign_waits, split_wait

# Spans that are this rank's own work: what imbalance compares.
COMPUTE = ("forward", "backward")
# What a rank has of a batch: the counter before balancing and the one after it.
_SHARES = {
    "samples": ("samples", "after_samples"),
    "tokens": ("tokens", "after_tokens"),
    "longest": ("max_length", "after_longest"),
    "cost": ("before_cost", "after_cost"),
}


def merge_step(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges each rank's record of a step (`Ledger.drain`), by rank and on one clock
    (`shift_clock`).

    Returns the figures of the step, as in a line of ledger.jsonl. Times are milliseconds;
    docs/how/ledger.md lists the keys. Raises ValueError if ranks recorded different collectives.
    """
    steps = [StepRecord.parse(record) for record in records]
    ranks = len(steps)
    kinds = [[collective.kind for collective in step.collectives] for step in steps]
    if any(of_rank != kinds[0] for of_rank in kinds):
        raise ValueError(f"ranks recorded different collectives in step {steps[0].step}: {kinds}")
    straggler, exposed = _sum_waits(steps)
    mean = sum((step.end - step.begin) / 1e6 for step in steps) / ranks
    compute = [
        sum(span.end - span.begin for span in step.spans if span.name in COMPUTE) / 1e6
        for step in steps
    ]
    counters = _merge_counters(steps)
    shares = _list_shares(steps)
    return {
        "step": steps[0].step,
        "step_ms": mean,
        "straggler_percent": 100 * sum(straggler) / ranks / mean,
        "straggler_ms": straggler,
        "exposed_ms": {kind: sum(times) / ranks for kind, times in exposed.items()},
        "exposed_ms_per_rank": [sum(times) for times in zip(*exposed.values(), strict=True)],
        "lane_ms": [round(step.lane_wait / 1e6, 3) for step in steps],
        "busy_ms": _list_busy(steps),
        **shares,
        "bytes": _sum_bytes(steps),
        "paths": sum_paths(
            (kind, path, sent)
            for step in steps
            for kind, by_path in step.paths.items()
            for path, sent in by_path.items()
        ),
        "compute_ms": compute,
        "imbalance": max(compute) * ranks / sum(compute) if sum(compute) else 1.0,
        "spans_ms": _average_spans(steps),
        "samples": counters.get("samples", 0),
        "tokens": counters.get("tokens", 0),
        **_derive_ratios(counters, shares["before"].get("cost", [])),
    }


def _sum_waits(steps: Sequence[StepRecord]) -> tuple[list[float], dict[str, list[float]]]:
    """Straggler milliseconds of each rank, and exposed milliseconds by kind and rank."""
    straggler = [0.0] * len(steps)
    exposed = {kind: [0.0] * len(steps) for kind in KINDS}
    waits = [assign_waits(step.collectives) for step in steps]
    for number, meeting in enumerate(zip(*(step.collectives for step in steps), strict=True)):
        last_arrival = max(collective.issued for collective in meeting)
        for rank, collective in enumerate(meeting):
            for begin, end in waits[rank][number]:
                parts = split_wait(begin, end, last_arrival)
                straggler[rank] += parts.straggler / 1e6
                exposed[collective.kind][rank] += parts.exposed / 1e6
    return straggler, exposed


def _sum_bytes(steps: Sequence[StepRecord]) -> dict[str, int]:
    """Bytes that all ranks sent, by kind."""
    collectives = [collective for step in steps for collective in step.collectives]
    return {kind: sum(c.sent for c in collectives if c.kind == kind) for kind in KINDS}


def _average_spans(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Milliseconds of each span, mean over ranks."""
    spans: dict[str, float] = defaultdict(float)
    for span in (span for step in steps for span in step.spans):
        spans[span.name] += (span.end - span.begin) / 1e6 / len(steps)
    return dict(spans)


def _merge_counters(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Sums over ranks; for counters `max_...` the maximum."""
    counters: dict[str, float] = {}
    for step in steps:
        for name, value in step.counters.items():
            if name.startswith("max_"):
                counters[name] = max(counters.get(name, value), value)
            else:
                counters[name] = counters.get(name, 0) + value
    return counters


def _list_busy(steps: Sequence[StepRecord]) -> dict[str, list[float]]:
    """Milliseconds of each rank's main thread by span, without waits, to the microsecond."""
    names = dict.fromkeys(name for step in steps for name in step.busy)
    return {name: [round(step.busy.get(name, 0) / 1e6, 3) for step in steps] for name in names}


def _list_shares(steps: Sequence[StepRecord]) -> dict[str, dict[str, list[float]]]:
    """Each rank's share of the batch `before` and `after` balancing, empty without balancing."""
    shares: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
    for name, counters in _SHARES.items():
        for when, counter in zip(shares, counters, strict=True):
            if any(counter in step.counters for step in steps):
                shares[when][name] = [step.counters.get(counter, 0) for step in steps]
    return shares


def _derive_ratios(counters: Mapping[str, float], costs: Sequence[float]) -> dict[str, float]:
    """Figures of some steps only. `costs`: predicted per rank before balancing."""
    ratios: dict[str, float] = {}
    if counters.get("max_length"):
        padded = counters["samples"] * counters["max_length"]
        ratios["sparsity"] = 1 - counters["tokens"] / padded
    if "max_predicted_imbalance" in counters:
        ratios["predicted_imbalance"] = counters["max_predicted_imbalance"]
        if sum(costs):
            ratios["predicted_imbalance_before"] = max(costs) * len(costs) / sum(costs)
        tokens = max(1, counters.get("tokens", 0))
        ratios["moved_tokens_percent"] = 100 * counters["max_moved_tokens"] / tokens
    if "bytes_between_machines" in counters:
        ratios["bytes_between_machines"] = counters["bytes_between_machines"]
    if "split_parts" in counters:
        ratios["split_samples"] = counters["max_split_samples"]
        ratios["split_parts"] = counters["split_parts"]
    if "max_cost_error" in counters:
        ratios["cost_error_percent"] = 100 * counters["max_cost_error"]
    if counters.get("requests"):
        ratios["collision_percent"] = 100 * counters["collisions"] / counters["requests"]
    if counters.get("cache_wanted"):
        ratios["cache_miss_percent"] = 100 * counters["cache_missed"] / counters["cache_wanted"]
        ratios["cache_bytes_up"] = counters["cache_bytes_up"]
        ratios["cache_bytes_down"] = counters["cache_bytes_down"]
    if "dynamic_rows" in counters:
        ratios |= {name: value for name, value in counters.items() if name.startswith("dynamic_")}
        if capacity := ratios.pop("dynamic_capacity", 0):  # earlier versions did not count it
            ratios["dynamic_fill_percent"] = 100 * counters["dynamic_rows"] / capacity
    return ratios
