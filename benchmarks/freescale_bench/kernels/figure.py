"""The share of the GPU's limits that each kernel reaches, next to plain torch."""

from __future__ import annotations

from typing import Any

from freescale_bench.common import drawing as svg
from freescale_bench.common.markdown import Results, single

LEFT, WIDTH, ROW, TOP = 400, 360, 20, 46
OURS, PLAIN = "#4c78a8", "#f58518"


def find_shares(rows: list[dict[str, Any]]) -> list[tuple[str, float, float | None, str]]:
    """Returns (case, % of the ceiling, plain torch's %, rate) of each row with a ceiling."""
    # earlier results include moves of samples, which training does on the host
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
                f"{row['rate']:.{digits}f} {row['unit']}",
            )
        )
    return found


def draw_shares(used: Results) -> str:
    result = single(used)
    drawn = find_shares(result["rows"])
    height = TOP + len(drawn) * ROW + 30
    parts = svg.begin(LEFT + WIDTH + 110, height + 20)
    ceilings = result["ceilings"]
    copy, product = ceilings["copy_tb_per_s"], ceilings["bf16_matrix_tflop_per_s"]
    title = (
        f"Share of a measured copy ({copy:.2f} TB/s) or bf16 matrix product ({product:.0f} "
        "TFLOP/s), one H200"
    )
    parts.append(svg.text(8, 18, title, more='font-weight="bold"'))
    for tick in (0, 25, 50, 75, 100):
        x = LEFT + WIDTH * tick / 100
        parts.append(svg.rule(x, TOP - 6, x, height - 28, "#ddd"))
        parts.append(svg.text(x, TOP - 10, f"{tick} %", "middle"))
    for place, (case, percent, plain, rate) in enumerate(drawn):
        y = TOP + place * ROW
        parts.append(svg.text(LEFT - 8, y + 12, case, "end"))
        parts.append(svg.rect(LEFT, y, WIDTH * percent / 100, ROW - 6, OURS))
        if plain is not None:
            parts.append(svg.rect(LEFT, y + 4, WIDTH * plain / 100, ROW - 14, PLAIN))
        parts.append(svg.text(LEFT + WIDTH * percent / 100 + 6, y + 12, rate))
    note = (
        f'<tspan fill="{OURS}">Triton</tspan>, <tspan fill="{PLAIN}">plain torch</tspan> on '
        "the same GPU where it was timed"
    )
    parts.append(f'<text x="{LEFT}" y="{height - 8}" {svg.TEXT}>{note}</text>')
    return svg.finish([*parts, *svg.caption(LEFT, height + 10, WIDTH, used)[0]])
