"""Balancing as tables: benefit, cost, and distance to the lower bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freescale_bench.common.markdown import Results, format_table, format_verdict, single

ARMS = ("none", "greedy", "local", "adapted")


def format_measured(used: Results, folder: str) -> str:
    """Formats straggler % and step time of each run's arms."""
    rows = []
    for result in used.values():
        by = {row["arm"]: row for row in result["rows"]}
        kind = (
            "GPU ranks sharing one H200"
            if result["machine"]["gpu"]
            else "CPU ranks, a pinned core each"
        )
        cells = [
            f"{by[arm]['straggler_percent']:.1f} %, {by[arm]['step_ms']['median']:.0f} ms"
            for arm in ARMS
        ]
        rows.append((f"{by['none']['ranks']} {kind}", *cells))
    head = ("straggler %, step", "none", "greedy (default)", "local", "greedy, `--balance-adapt`")
    return format_table(used, folder, head, rows)


def format_cost(used: Results, folder: str) -> str:
    """Formats the cost of balancing and the remaining imbalance, by run and arm."""
    rows = []
    for result in used.values():
        by = {row["arm"]: row for row in result["rows"]}
        arms = [by[name] for name in ARMS]
        kind = "GPU ranks" if result["machine"]["gpu"] else "CPU ranks"
        (off,) = [
            entry["measured"]
            for entry in result["claims"]
            if "predicted against measured" in entry["claim"]
        ]
        memory = (
            ""
            if "gpu_peak_bytes_per_rank" not in by["none"]
            else _format_peaks(by["none"], by["greedy"])
        )
        rows.append(
            (
                f"{by['none']['ranks']} {kind}",
                ", ".join(f"{row['balancing_percent']:.2f}" for row in arms[1:]) + " %",
                ", ".join(f"{row['imbalance']:.2f}" for row in arms),
                f"{off:.1f} %",
                memory,
            )
        )
    head = (
        "",
        "own time: greedy, local, adapted",
        "imbalance of compute: none, greedy, local, adapted",
        "adapted: predicted off measured time of a rank",
        "largest peak on the GPU: none, greedy",
    )
    targets = (
        "Targets: own time at most 1 % of the step, predicted times at most 5 % off the "
        "measured ones (median, after 50 steps)."
    )
    return format_table(used, folder, head, rows, note=f"{targets} {format_verdict(used)}")


def _format_peaks(*rows: Mapping[str, Any]) -> str:
    return ", ".join(f"{max(row['gpu_peak_bytes_per_rank']) / 1e9:.1f}" for row in rows) + " GB"


def format_bound(used: Results, folder: str) -> str:
    """Formats how far each partitioner's largest load exceeds the lower bound in its worst
    configuration, by samples per rank."""
    result = single(used)
    batches = sorted({row["batch"] for row in result["rows"]})
    found: dict[str, dict[int, float]] = {}
    for row in result["rows"]:
        worst = found.setdefault(row["arm"], dict.fromkeys(batches, 0.0))
        worst[row["batch"]] = max(worst[row["batch"]], row["above_bound_percent"])
    rows = [(arm, *(f"{worst[batch]:.1f} %" for batch in batches)) for arm, worst in found.items()]
    head = (
        "largest load above the bound, worst configuration",
        *(f"{batch} samples a rank" for batch in batches),
    )
    return format_table(used, folder, head, rows, conditions="Predicted.")
