"""Short histories before and now, as a table."""

from __future__ import annotations

import statistics

from freescale_bench.common.markdown import Results, format_table, single


def format_short(used: Results, folder: str) -> str:
    result = single(used)
    arms = list(dict.fromkeys(row["arm"] for row in result["rows"]))
    head = ("", "step, ms", "processor, ms", "tokens of a step", "hr@10 (validation)")
    rows = []
    for arm in arms:
        mine = [row for row in result["rows"] if row["arm"] == arm]
        step = statistics.median(row["step_ms"] for row in mine)
        processor, tokens, hits = (
            statistics.mean(row[key] for row in mine) for key in ("cpu_ms", "tokens", "hr@10")
        )
        rows.append((arm, f"{step:.1f}", f"{processor:.1f}", f"{tokens:.0f}", f"{hits:.4f}"))
    about = result["training"]
    file = about["file"]
    conditions = (
        f"{file.get('name', 'Generated')}, {file['users']:,} users, {file['items']:,} items; "
        f"{about['settings']}, {about['steps']} steps; before: the file names the commit."
    )
    return format_table(used, folder, head, rows, conditions=conditions)
