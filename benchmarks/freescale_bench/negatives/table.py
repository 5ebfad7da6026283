"""Kinds of negatives side by side, as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from freescale_bench.common.markdown import Results, format_table, single


def format_negatives(used: Results, folder: str) -> str:
    result = single(used)
    rows, about = result["rows"], result["training"]
    suffix = "/unseen" if "hr@10/unseen" in rows[0] else ""
    head = [""]
    for name in about["files"]:
        head += [f"{name}: hr@10", "ndcg@10"]
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        line = [kind]
        for name in about["files"]:
            mine = [row for row in rows if row["kind"] == kind and row["data"] == name]
            line += [_format_mean(mine, f"{metric}{suffix}") for metric in ("hr@10", "ndcg@10")]
        lines.append(line)
    files = "; ".join(
        f"{name}: {part['users']:,} users, {part['items']:,} items, {part['events']:,} events"
        for name, part in about["files"].items()
    )
    kept = about["settings"]
    conditions = (
        f"Validation, {'items of the history left out' if suffix else 'all items'}; mean and half "
        f"the range of {about['seeds']} seeds. The most frequent items, and users with five or "
        f"more events of them. {files}. Width {kept['width']}, {kept['layers']} "
        f"layers, temperature {kept['temperature']}, {kept['negatives']} negatives per "
        f"{kept['negatives_per']}, {about['steps']} steps of {kept['global_batch']} samples, one "
        "CPU rank."
    )
    return format_table(used, folder, head, lines, conditions=conditions)


def _format_mean(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [row[name] for row in rows]
    spread = (max(values) - min(values)) / 2
    return f"{statistics.mean(values):.4f} ± {spread:.4f}"
