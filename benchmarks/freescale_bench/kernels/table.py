"""Speed of the kernels on a GPU, as a table."""

from __future__ import annotations

from typing import Any

from freescale_bench.common.markdown import Results, format_table, single

# Kernels of a training step; raw files may also have moves of samples.
_GROUPS = ("rows", "unique", "attention", "pieces", "layer", "sampled_softmax")


HEAD = ("", "time, ms", "rate", "of the ceiling", "plain torch, ms", "times faster")


def format_kernels(used: Results, folder: str) -> str:
    result = single(used)
    rows = [format_row(row) for row in result["rows"] if "ms" in row and row["group"] in _GROUPS]
    copies = result["ceilings"]["copy_tb_per_s"]
    products = result["ceilings"]["bf16_matrix_tflop_per_s"]
    note = (
        f"Ceilings, measured in the same run: a copy reaches {copies:.2f} TB/s, a bfloat16 matrix "
        f"product {products:.0f} TFLOP/s."
    )
    return format_table(used, folder, HEAD, rows, note=note)


def format_row(row: dict[str, Any]) -> tuple[str, ...]:
    time = row["ms"]["median"]
    plain = row.get("plain_ms", {}).get("median")
    rate = row.get("rate")
    return (
        row["case"],
        f"{time:.3g}",
        f"{rate:.3g} {row['unit']}" if rate is not None else "",
        f"{row['ceiling_percent']:.0f} %" if row.get("ceiling_percent") is not None else "",
        f"{plain:,.4g}" if plain is not None else "",
        f"{plain / time:.1f}" if plain is not None else "",
    )
