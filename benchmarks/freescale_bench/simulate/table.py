"""The simulator as tables: each technique on 256 GPUs, and predictions against measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freescale.simulate.verdict import ALL, BASE, write_verdict
from freescale_bench.common.markdown import Results, fold, format_sources, format_table, single

_TARGETS = (
    ("step_error_percent", 10.0, " %"),
    ("straggler_points", 2.0, ""),
    ("exposed_points", 2.0, ""),
)


def format_ablation(used: Results, folder: str) -> str:
    """Formats the predicted effect of each technique on 256 GPUs."""
    found = [row for row in _select(used, "by GPUs") if row["gpus"] == 256]
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


def format_prediction(used: Results, folder: str) -> str:
    """Formats the verdict at the paper's setting, as the command prints it."""
    found = {row["arm"]: row for row in _select(used, "by GPUs") if row["gpus"] == 256}
    sources = fold("Raw data", format_sources(used, folder))
    return f"> {write_verdict(found, [], 'H100')}\n\n{sources}"


def format_scaling(used: Results, folder: str) -> str:
    """Formats scaling to more GPUs, with the same samples per GPU."""
    rows = _select(used, "by GPUs")
    speed = {row["gpus"]: row["samples_per_second"] for row in rows if row["arm"] == BASE}
    shown = []
    for count in (64, 256, 1024, 4096):
        of_arm = {row["arm"]: row for row in rows if row["gpus"] == count}
        if BASE in of_arm:
            everything = of_arm[ALL]
            shown.append(
                (
                    f"{count:,}",
                    f"{of_arm[BASE]['straggler_percent']:.1f} %",
                    f"{everything['straggler_percent']:.1f} %",
                    f"{sum(of_arm[BASE]['exposed_ms'].values()):.1f} ms",
                    f"{sum(everything['exposed_ms'].values()):.1f} ms",
                    f"{everything['samples_per_second'] / speed[count]:.2f} x",
                )
            )
    head = (
        "GPUs",
        "straggler, TorchRec",
        "all techniques",
        "exposed, TorchRec",
        "all techniques",
        "speed-up",
    )
    return format_table(used, folder, head, shown, conditions="Predicted.")


def format_sensitivity(used: Results, folder: str) -> str:
    """Formats the sensitivity to assumptions: jitter of compute, latency of the network."""
    rows = [
        (
            f"{100 * row['jitter']:g} % jitter of compute, 64 GPUs",
            "balancing" if row["arm"] == "greedy" else "no balancing",
            f"{row['straggler_percent']:.1f} %",
            f"{row['exposed_percent']:.1f} %",
        )
        for row in _select(used, "jitter")
    ]
    rows += [
        (
            "four times the latency, 256 GPUs",
            row["arm"],
            f"{row['straggler_percent']:.1f} %",
            f"{row['exposed_percent']:.1f} %",
        )
        for row in _select(used, "four times the latency")
    ]
    head = ("assumption", "", "straggler", "exposed")
    return format_table(used, folder, head, rows, conditions="Predicted.")


def format_one_sample(used: Results, folder: str) -> str:
    """Formats a fixed global batch: from how many GPUs one sample is too long."""
    rows = [
        (
            f"{row['gpus']:,}",
            f"{row['largest_over_mean']:.2f}",
            f"{row['straggler_percent']:.1f} %",
            f"{row['step_ms']:,.0f} ms",
        )
        for row in _select(used, "one sample")
    ]
    head = ("GPUs", "longest sample, of a rank's mean share", "straggler", "step")
    return format_table(used, folder, head, rows, conditions="Predicted.")


def format_exchange(used: Results, folder: str) -> str:
    """Formats predicted times of the flat and the two-level exchange."""
    found = single(used)["rows"]
    by_nodes = {(r["network"], r["way"], r["nodes"]): r for r in found}
    counts = [
        nodes for nodes in sorted({r["nodes"] for r in found}) if nodes in (2, 8, 32, 128, 512)
    ]
    rows = []
    for name, way in dict.fromkeys((r["network"], r["way"]) for r in found):
        each = [by_nodes[name, way, nodes] for nodes in counts]
        times = (f"{r['flat_ms']:.1f}, {r['two_level_ms']:.1f}" for r in each)
        rows.append((f"{name}, {way}", *times))
    shares = (by_nodes[found[0]["network"], found[0]["way"], nodes] for nodes in counts)
    rows.append(("duplicates", *(f"{r['duplicates_percent']:.0f} %" for r in shares)))
    head = ("ms: flat, two-level", *(f"{nodes} nodes" for nodes in counts))
    return format_table(used, folder, head, rows, conditions="Predicted.")


def _select(used: Results, figure: str) -> list[Mapping[str, Any]]:
    return [row for row in single(used)["rows"] if row["figure"] == figure]


def format_validation(used: Results, folder: str) -> str:
    """Counts rows within the simulator's targets, by testbed and model, without rows used to fit
    curves."""
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
        (name, str(len(blind)), *(_count_within(blind, *target) for target in _TARGETS))
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
