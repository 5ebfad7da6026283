"""Steps of DLRMv4 on a GPU, as a table."""

from __future__ import annotations

from freescale_bench.common.markdown import Results, format_table, single


def format_dlrm(used: Results, folder: str) -> str:
    """Formats a row per arm and kind of batch."""
    rows = [
        (
            f"{row['arm']}, {row['data']}",
            f"{row['samples']:,.0f}",
            f"{row['step_ms']['median']:.1f} ms",
            f"{row['samples_per_second']:,.0f}",
            f"{row['tflop_per_s']:.0f}",
            f"{row['memory_gib']:.0f} GiB",
        )
        for row in single(used)["rows"]
    ]
    head = ("", "samples of a batch", "step", "samples/s", "TFLOP/s by MLPerf's formula", "memory")
    return format_table(used, folder, head, rows)
