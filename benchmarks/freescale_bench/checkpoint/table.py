"""Bytes of checkpoints, full and differential, as a table."""

from __future__ import annotations

from freescale_bench.common.markdown import Results, format_table, single


def format_checkpoint(used: Results, folder: str) -> str:
    result = single(used)
    head = (
        "ids a step",
        "rows of a delta",
        "delta",
        "full",
        "cycle of 20",
        "20 full ones",
        "fewer bytes",
    )
    rows = []
    for row in result["rows"]:
        count = len(row["delta_bytes"])
        changed, size = (sum(row[key]) / count for key in ("delta_rows", "delta_bytes"))
        rows.append(
            (
                f"{row['ids_per_step']:,}",
                f"{changed:,.0f}",
                f"{size / 1e6:,.0f} MB",
                f"{row['full_bytes'] / 1e6:,.0f} MB",
                f"{row['cycle_bytes'] / 1e9:.1f} GB",
                f"{row['full_cycle_bytes'] / 1e9:.1f} GB",
                f"{row['fewer']:.1f} x",
            )
        )
    about = result["workload"]
    conditions = (
        f"A table of {about['rows']:,} x {about['width']} with Adam, ids by Zipf's law with "
        f"exponent {about['popularity']}, a checkpoint every 50 steps."
    )
    return format_table(used, folder, head, rows, conditions=conditions)
