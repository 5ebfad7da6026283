"""Urgent traffic behind bulk, as a table."""

from __future__ import annotations

from freescale_bench.common.markdown import Results, format_table, single


def format_hostwire(used: Results, folder: str) -> str:
    rows = [
        (
            row["arm"],
            f"{row['alone_ms']['median']:.1f} ms",
            f"{row['behind_ms']['median']:.1f} ms",
            f"{row['behind_over_alone']:.2f} x",
        )
        for row in single(used)["rows"]
    ]
    return format_table(used, folder, ("", "alone", "behind the bulk", ""), rows)
