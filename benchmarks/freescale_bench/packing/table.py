"""What a balanced step packs and unpacks on the host, as a table."""

from __future__ import annotations

from freescale_bench.common.markdown import Results, format_table, single


def format_packing(used: Results, folder: str) -> str:
    rows = [
        (
            f"{row['samples']} samples of up to {row['maximum_length']:,} events, "
            f"{row['ranks']} ranks",
            f"{row['bytes'] / 1e6:.1f} MB",
            f"{row['pack_ms']['median']:.1f} ms",
            f"{row['unpack_ms']['median']:.1f} ms",
        )
        for row in single(used)["rows"]
    ]
    head = ("a rank", "its message", "packing", "unpacking")
    return format_table(used, folder, head, rows, conditions="One core; medians.")
