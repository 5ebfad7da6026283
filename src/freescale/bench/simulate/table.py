"""The simulator as tables: each technique on 256 GPUs, and predictions against measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freescale.bench.common.markdown import Results, format_table, single
from freescale.simulate.verdict import BASE

_ASKED = (
    ("step_error_percent", 10.0, " %"),
    ("straggler_points", 2.0, ""),
    ("exposed_points", 2.0, ""),
)


def format_ablation(used: Results, folder: str) -> str:
    """What each technique would give on 256 GPUs."""
    found = [
        row for row in single(used)["rows"] if row["figure"] == "by GPUs" and row["gpus"] == 256
    ]
    step = {row["arm"]: row["step_ms"] for row in found}
    rows = [
        (
            row["arm"],
            f"{step[row['arm']]:,.0f} ms",
            f"{row['straggler_percent']:.1f} %",
            f"{sum(row['exposed_ms'].values()):.1f} ms",
            f"{step[BASE] / step[row['arm']]:.2f} x",
        )
        for row in found
    ]
    head = ("", "step", "straggler", "exposed", "of TorchRec")
    return format_table(used, folder, head, rows, conditions="Predicted.")


def format_validation(used: Results, folder: str) -> str:
    """Rows within what was asked of the simulator, by testbed and model; without those that a curve
    was taken from."""
    groups: dict[str, list[Mapping[str, Any]]] = {
        "A: 2 hosts, 200 Mbit/s, MLP": [],
        "A: 2 CPU ranks, HSTU": [],
        "C: 4 and 8 ranks on one H200, HSTU": [],
        "C: 4 ranks on one H200, MLP, over hostwire": [],
    }
    for row in single(used)["rows"]:
        if not row["fitted"]:
            groups[_choose_group(row)].append(row)
    rows = [
        (name, str(len(blind)), *(_count_within(blind, *asked) for asked in _ASKED))
        for name, blind in groups.items()
    ]
    head = (
        "testbed",
        "rows",
        "step within 10 %",
        "straggler within 2 points",
        "exposed within 2 points",
    )
    return format_table(used, folder, head, rows)


def _choose_group(row: Mapping[str, Any]) -> str:
    configuration = row["configuration"]
    if row["testbed"] == "A":
        return "A: 2 CPU ranks, HSTU" if "ranks" in configuration else "A: 2 hosts, 200 Mbit/s, MLP"
    # Earlier results call the staged benchmark `priority`.
    if configuration.startswith(("staged-", "priority-")):
        return "C: 4 ranks on one H200, MLP, over hostwire"
    return "C: 4 and 8 ranks on one H200, HSTU"


def _count_within(rows: Sequence[Mapping[str, Any]], key: str, limit: float, unit: str) -> str:
    worst = max((row[key] for row in rows), key=abs)
    return f"{sum(abs(row[key]) <= limit for row in rows)} (worst {worst:+.1f}{unit})"
