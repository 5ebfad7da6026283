"""Draws how much of what the GPU can do each kernel reaches, and how much plain torch does, from the results.

.venv/bin/python benchmarks/figure_kernels.py docs/figures/kernels.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "kernels-h200.json"
LEFT, WIDTH, ROW, TOP = 400, 360, 20, 46
TEXT = 'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#333"'
OURS, PLAIN = "#4c78a8", "#f58518"


def bars(rows: list[dict[str, Any]]) -> list[tuple[str, float, float | None, str]]:
    """(case, % of the ceiling, plain torch's %, rate) of each row with a ceiling, but for small moves, bound by latency."""
    chosen = [row for row in rows if row.get("ceiling_percent") and "of ids" not in row["case"] and "72 MB" not in row["case"]]
    found = []
    for row in chosen:
        plain = row["ceiling_percent"] / row["faster"] if "faster" in row else None
        digits = 0 if row["unit"] == "TFLOP/s" else 1
        found.append((row["case"], row["ceiling_percent"], plain, f"{row['rate']:.{digits}f} {row['unit']}"))
    return found


def picture(result: dict[str, Any]) -> str:
    drawn = bars(result["rows"])
    height = TOP + len(drawn) * ROW + 30
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 110} {height}" role="img">']
    parts.append('<rect width="100%" height="100%" fill="#fff"/>')
    ceilings = result["ceilings"]
    copy, product = ceilings["copy_tb_per_s"], ceilings["bf16_matrix_tflop_per_s"]
    title = f"Share of a measured copy ({copy:.2f} TB/s) or bf16 matrix product ({product:.0f} TFLOP/s), one H200"
    parts.append(f'<text x="8" y="18" {TEXT} font-weight="bold">{title}</text>')
    for percent in (0, 25, 50, 75, 100):
        x = LEFT + WIDTH * percent / 100
        parts.append(f'<line x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{height - 28}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{TOP - 10}" {TEXT} text-anchor="middle">{percent} %</text>')
    for place, (case, percent, plain, rate) in enumerate(drawn):
        y = TOP + place * ROW
        parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" {TEXT} text-anchor="end">{case}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH * percent / 100:.1f}" height="{ROW - 6}" fill="{OURS}"/>')
        if plain is not None:
            parts.append(f'<rect x="{LEFT}" y="{y + 4}" width="{WIDTH * plain / 100:.1f}" height="{ROW - 14}" fill="{PLAIN}"/>')
        parts.append(f'<text x="{LEFT + WIDTH * percent / 100 + 6:.1f}" y="{y + 12}" {TEXT}>{rate}</text>')
    note = f'<tspan fill="{OURS}">Triton</tspan>, <tspan fill="{PLAIN}">plain torch</tspan> on the same GPU where it was timed'
    parts.append(f'<text x="{LEFT}" y="{height - 8}" {TEXT}>{note}</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(picture(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
