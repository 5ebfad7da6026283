"""How much of what the GPU can do each kernel reaches, and how much plain torch does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freescale_bench.common.drawing import (
    TEXT,
    close_svg,
    draw_caption,
    open_svg,
)

LEFT, WIDTH, ROW, TOP = 400, 360, 20, 46
OURS, PLAIN = "#4c78a8", "#f58518"


def find_shares(rows: list[dict[str, Any]]) -> list[tuple[str, float, float | None, str]]:
    """(case, % of the ceiling, plain torch's %, rate) of each row with a ceiling."""
    # files of earlier runs have moves of samples, which training makes on the host
    chosen = [row for row in rows if row.get("ceiling_percent") and row["group"] != "moves"]
    found = []
    for row in chosen:
        plain = row["ceiling_percent"] / row["faster"] if "faster" in row else None
        digits = 0 if row["unit"] == "TFLOP/s" else 1
        found.append(
            (
                row["case"],
                row["ceiling_percent"],
                plain,
                (f"{row['rate']:.{digits}f} {row['unit']}"),
            )
        )
    return found


def draw_shares(used: Mapping[str, Mapping[str, Any]]) -> str:
    (result,) = used.values()
    drawn = find_shares(result["rows"])
    height = TOP + len(drawn) * ROW + 30
    parts = open_svg(LEFT + WIDTH + 110, height + 20)
    ceilings = result["ceilings"]
    copy, product = ceilings["copy_tb_per_s"], ceilings["bf16_matrix_tflop_per_s"]
    title = (
        f"Share of a measured copy ({copy:.2f} TB/s) or bf16 matrix product ({product:.0f} "
        "TFLOP/s), one H200"
    )
    parts.append(f'<text x="8" y="18" {TEXT} font-weight="bold">{title}</text>')
    for tick in (0, 25, 50, 75, 100):
        x = LEFT + WIDTH * tick / 100
        parts.append(f'<line x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{height - 28}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{TOP - 10}" {TEXT} text-anchor="middle">{tick} %</text>')
    for place, (case, percent, plain, rate) in enumerate(drawn):
        y = TOP + place * ROW
        parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" {TEXT} text-anchor="end">{case}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH * percent / 100:.1f}" '
            f'height="{ROW - 6}" fill="{OURS}"/>'
        )
        if plain is not None:
            parts.append(
                f'<rect x="{LEFT}" y="{y + 4}" width="{WIDTH * plain / 100:.1f}" '
                f'height="{ROW - 14}" fill="{PLAIN}"/>'
            )
        parts.append(
            f'<text x="{LEFT + WIDTH * percent / 100 + 6:.1f}" y="{y + 12}" {TEXT}>{rate}</text>'
        )
    note = (
        f'<tspan fill="{OURS}">Triton</tspan>, <tspan fill="{PLAIN}">plain torch</tspan> on '
        "the same GPU where it was timed"
    )
    parts.append(f'<text x="{LEFT}" y="{height - 8}" {TEXT}>{note}</text>')
    return close_svg([*parts, *draw_caption(LEFT, height + 10, WIDTH, used)[0]])
