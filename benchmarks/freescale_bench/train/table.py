"""Utilization of a GPU by `freescale train`, as a table."""

from __future__ import annotations

from typing import Any

from freescale_bench.common.markdown import Results, format_table, single


def format_train(used: Results, folder: str) -> str:
    result = single(used)
    rows = [_format_row(row) for row in result["rows"] if "step_ms" in row]
    head = (
        "shape", "samples x events", "width, layers, heads", "step, ms", "tokens/s", "TFLOP/s",
        "device busy", "kernels a step", "memory, GiB",
    )  # fmt: skip
    return format_table(used, folder, head, rows)


def _format_row(row: dict[str, Any]) -> tuple[str, ...]:
    step = row["step_ms"]
    return (
        row["shape"],
        f"{row['samples']} x {row['tokens'] / row['samples']:,.0f}",
        f"{row['width']}, {row['layers']}, {row['heads']}",
        f"{step['median']:.1f} ({step['p20']:.1f} to {step['p80']:.1f})",
        f"{row['tokens_per_second'] / 1e6:.2f} M",
        f"{row['tflop_per_s']:.0f}",
        f"{row['device_busy_percent']:.0f} %" if "device_busy_percent" in row else "",
        f"{row['kernels']:.0f}" if "kernels" in row else "",
        f"{row['memory_gib']:.1f}" if "memory_gib" in row else "",
    )
