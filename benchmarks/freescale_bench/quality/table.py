"""Quality of recipes and of a default run, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freescale_bench.common.markdown import Results, format_table, single


def format_quality(used: Results, folder: str) -> str:
    result = single(used)
    names = [name for name in result["rows"][0] if "@" in name or name == "mrr"]
    rows = [(row["arm"], *(format_figure(row[name]) for name in names)) for row in result["rows"]]
    steps = result["training"].get("steps", result["rows"][0].get("steps"))
    steps = steps[0] if isinstance(steps, list) else steps
    conditions = f"{result['dataset']['name']}, {result['training']['settings']}, {steps} steps."
    return format_table(used, folder, ("", *names), rows, conditions=conditions)


def format_recipes(used: Results, folder: str) -> str:
    """Formats a row per model and data set, grouped by result."""
    rows, names = [], ("hr@10", "ndcg@10", "hr@10/unseen", "ndcg@10/unseen")
    together = [result for result in used.values() if result["name"] == "quality-together"]
    note = " ".join(_format_together(result) for result in together)
    used = {name: result for name, result in used.items() if "comparison" in result}
    for result in used.values():
        for row in result["rows"]:
            against = _format_difference(result, row)
            figures = (format_figure(row[name]) for name in names)
            rows.append((result["dataset"]["name"], row["arm"], *figures, against))
    head = ("data", "model", *names, "against the peer (users drawn anew, 95 %)")
    return format_table(used, folder, head, rows, note=note)


def format_recbole(used: Results, folder: str) -> str:
    """Formats recipes against RecBole's SASRec: epochs, seconds, quality."""
    rows, notes = [], []
    for result in used.values():
        name = result["dataset"]["name"]
        for row in result["rows"]:
            figures = (f"{row[metric]:.4f}" for metric in ("hr@10", "ndcg@10"))
            rows.append((name, row["arm"], str(row["epochs"]), f"{row['seconds']:,.0f}", *figures))
            if "from" in row:
                day = row["from"]["date"][:10]
                notes.append(f"{row['arm']} on {name}: from an earlier run, {day}.")
    head = ("data", "model", "epochs", "seconds", "hr@10", "ndcg@10")
    return format_table(used, folder, head, rows, conditions=" ".join(notes))


def format_figure(value: float | Mapping[str, Any]) -> str:
    """Formats a number, or a mean over seeds with its interval."""
    if not isinstance(value, Mapping):
        return f"{value:.3f}"
    spread = f" ± {value['high'] - value['mean']:.4f}" if "high" in value else ""
    return f"{value['mean']:.4f}{spread}"


def _format_together(result: Mapping[str, Any]) -> str:
    claims = (f"{one['claim']} {one['measured']:+.2f} %" for one in result["claims"])
    return "; ".join(claims) + "."


def _format_difference(result: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    if row is not result["rows"][0]:
        return ""
    return ", ".join(
        f"{name} {one['percent']:+.1f} %"
        + (f" ({one['low']:+.1f} to {one['high']:+.1f})" if "low" in one else "")
        for name, one in result.get("comparison", {}).items()
    )
