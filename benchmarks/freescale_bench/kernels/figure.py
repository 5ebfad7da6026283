"""How much of what the GPU can do each kernel reaches, how much plain torch does, and the time of a
kernel over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freescale_bench.common.drawing import (
    BLUE,
    ORANGE,
    RED,
    TEAL,
    TEXT,
    Axes,
    Line,
    close_svg,
    draw_caption,
    draw_panels,
    open_svg,
)

LEFT, WIDTH, ROW, TOP = 400, 360, 20, 46
OURS, PLAIN = "#4c78a8", "#f58518"


def find_shares(rows: list[dict[str, Any]]) -> list[tuple[str, float, float | None, str]]:
    """(case, % of the ceiling, plain torch's %, rate) of each row with a ceiling, but for small
    moves, bound by latency."""
    chosen = [
        row
        for row in rows
        if row.get("ceiling_percent") and "of ids" not in row["case"] and "72 MB" not in row["case"]
    ]
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


def draw_over_ranks(used: Mapping[str, Mapping[str, Any]]) -> str:
    """Time of packing and unpacking a rank's ids for an AllToAll, over the number of ranks."""
    (result,) = used.values()
    times: dict[str, list[tuple[float, float]]] = {}
    for row in result["rows"]:
        kind, _, ranks = row["case"].partition(" of ids, W = ")
        if ranks:
            times.setdefault(f"{kind}, Triton", []).append((int(ranks), 1e3 * row["ms"]["median"]))
            times.setdefault(f"{kind}, plain torch", []).append(
                (int(ranks), 1e3 * row["plain_ms"]["median"])
            )
    inks = {
        "dispatch, Triton": BLUE,
        "combine, Triton": TEAL,
        "dispatch, plain torch": RED,
        "combine, plain torch": ORANGE,
    }
    ticks = [(ranks, f"{ranks:g}") for ranks, _ in times["dispatch, Triton"]]
    lines = [Line(name, times[name], ink) for name, ink in inks.items()]
    axes = Axes("dispatch and combine of ids, microseconds", "ranks", ticks, lines, wide=420)
    note = (
        "Measured: 128 samples a rank, log-normal lengths up to 21,000; medians by device events."
    )
    return draw_panels([axes], used, note=note)
