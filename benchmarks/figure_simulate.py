"""Draws what bench_simulate.py found at the paper's setting.

.venv/bin/python benchmarks/figure_simulate.py docs/figures/simulate.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from figure_priority import opened, text  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "simulate-paper.json"
INK = ("#7f7f7f", "#e45756", "#72b7b2", "#2f4b7c", "#f2a541", "#54a24b", "#b279a2", "#9d755d")
PLOT, HIGH, LEFT, TOP, LINE = 300, 190, 52, 46, 14
Series = dict[str, list[tuple[float, float]]]


def panel(title: str, ticks: Sequence[tuple[float, str]], series: Series, at: tuple[float, float], below: str) -> list[str]:
    """Lines over evenly spaced ticks; the largest value sets the scale."""
    left, upper = at[0] + LEFT, at[1] + TOP
    top = max((value for points in series.values() for _, value in points), default=1.0)
    unit = next(step for step in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if top / step <= 6)
    scale = HIGH / (unit * max(1, -(-top // unit)))
    place = {value: left + number * PLOT / max(1, len(ticks) - 1) for number, (value, _) in enumerate(ticks)}
    parts = [text(left, upper - 18, title, more='font-weight="bold"')]
    for number in range(int(HIGH / scale / unit) + 1):
        y = upper + HIGH - number * unit * scale
        parts.append(f'<line x1="{left}" x2="{left + PLOT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e6e6e6"/>')
        parts.append(text(left - 6, y + 4, f"{number * unit:g}", "end"))
    parts += [text(place[value], upper + HIGH + 16, label, "middle") for value, label in ticks]
    parts.append(text(left + PLOT / 2, upper + HIGH + 32, below, "middle"))
    for number, (name, points) in enumerate(series.items()):
        ink = INK[number % len(INK)]
        drawn = " ".join(f"{place[x]:.1f},{upper + HIGH - y * scale:.1f}" for x, y in points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{ink}" stroke-width="2"/>')
        y = upper + HIGH + 50 + LINE * number
        parts.append(f'<line x1="{left}" x2="{left + 18}" y1="{y - 4}" y2="{y - 4}" stroke="{ink}" stroke-width="3"/>')
        parts.append(text(left + 24, y, name))
    return parts


def series(rows: Sequence[dict], figure: str, x: str, value: Callable[[dict], float], arms: Sequence[str] = ()) -> Series:
    made: Series = {}
    for row in rows:
        if row["figure"] == figure and (not arms or row["arm"] in arms):
            made.setdefault(row["arm"], []).append((row[x], value(row)))
    return made


def exposed(row: dict[str, Any]) -> float:
    return sum(row["exposed_ms"].values())


def main() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    gpus = sorted({row["gpus"] for row in rows if row["figure"] == "by GPUs"})
    over_gpus = [(float(count), f"{count}" if count < 1000 else f"{count // 1024}k") for count in gpus]
    caps = [
        (float(cap), f"{cap / 1000:g}k") for cap in sorted({row["cap"] for row in rows if row["figure"] == "straggler by length"})
    ]
    rates = [(rate, f"{100 * rate:g}") for rate in sorted({row["collisions"] for row in rows if row["figure"] == "by collisions"})]
    single = [(float(row["gpus"]), f"{row['gpus']}") for row in rows if row["figure"] == "one sample"]
    base = {row["gpus"]: row["samples_per_second"] for row in rows if row["figure"] == "by GPUs" and row["arm"] == "none"}
    balanced = {"straggler, balanced": [(row["gpus"], row["straggler_percent"]) for row in rows if row["figure"] == "one sample"]}
    lines = {
        "straggler": series(rows, "by GPUs", "gpus", lambda r: r["straggler_percent"], ("none", "balancing", "all")),
        "exposed": series(rows, "by GPUs", "gpus", exposed, ("plain TorchRec", "none", "staged", "all")),
        "lengths": series(rows, "straggler by length", "cap", lambda r: r["straggler_percent"]),
        "faster": series(rows, "by GPUs", "gpus", lambda r: r["samples_per_second"] / base[r["gpus"]]),
        "collisions": series(rows, "by collisions", "collisions", exposed),
    }
    drawn = [
        ("straggler %, 64 GPUs", caps, lines["lengths"], "longest history"),
        ("straggler %", over_gpus, lines["straggler"], "GPUs"),
        ("exposed communication, ms", over_gpus, lines["exposed"], "GPUs"),
        ("exposed communication, ms, 256 GPUs", rates, lines["collisions"], "collisions, %"),
        ("speed-up over none", over_gpus, lines["faster"], "GPUs"),
        ("straggler %, 8,192 samples in all", single, balanced, "GPUs"),
    ]
    wide, high = PLOT + LEFT + 40, HIGH + TOP + 60 + LINE * 8
    parts = opened(3 * wide, 2 * high)
    for number, (title, ticks, found, below) in enumerate(drawn):
        parts += panel(title, ticks, found, (wide * (number % 3), high * (number // 3)), below)
    Path(sys.argv[1]).write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
