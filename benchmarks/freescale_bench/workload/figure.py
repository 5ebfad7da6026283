"""What the workload does to a step by itself: sparsity and straggler % over its shape, collision %
over the catalogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freescale_bench.common.drawing import BLUE, GREY, ORANGE, RED, TEAL, Axes, Line, draw_panels

Results = Mapping[str, Mapping[str, Any]]
NOTE = (
    "Full lines: counted on what the generator drew. Dashed lines, hollow dots: predicted. "
    "Bars: 20th to 80th percentile."
)


def shorten(value: float) -> str:
    """21,000 as 21k, a million as 1M; 1,024 as it is."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit and value % (unit / 10) == 0:
            return f"{value / unit:.3g}{letter}"
    return f"{value:g}"


def draw_shape(used: Results) -> str:
    rows = [row for row in used["workload-cpu"]["rows"] if row["figure"] == "shape"]
    below = {"cap": "longest history", "batch": "samples of a rank", "ranks": "ranks"}
    return draw_panels(
        [_make_shape_axes(rows, sweep, words) for sweep, words in below.items()], used, note=NOTE
    )


def _make_shape_axes(rows: Sequence[Mapping[str, Any]], sweep: str, below: str) -> Axes:
    mine = [row for row in rows if row["sweep"] == sweep]

    def line(name: str, figure: str, arm: str, ink: str, predicted: bool) -> Line:
        of_arm = [row for row in mine if row["arm"] == arm]
        points = [(row[sweep], row[figure]["median"]) for row in of_arm]
        return Line(
            name,
            points,
            ink,
            predicted,
            [(row[sweep], row[figure]["p20"], row[figure]["p80"]) for row in of_arm],
        )

    lines = [
        line("sparsity of the lengths drawn", "sparsity_percent", "none", TEAL, False),
        line("straggler, no balancing", "straggler_percent", "none", RED, True),
        line("straggler, fixed (the paper's zig-zag)", "straggler_percent", "fixed", ORANGE, True),
        line("straggler, greedy", "straggler_percent", "greedy", BLUE, True),
    ]
    ticks = [(value, shorten(value)) for value in sorted({row[sweep] for row in mine})]
    return Axes("sparsity and straggler, %", below, ticks, lines)


def draw_collisions(used: Results) -> str:
    rows = [row for row in used["workload-cpu"]["rows"] if row["figure"] == "collisions"]
    below = {
        "ranks": "ranks",
        "items": "items of the catalogue",
        "popularity": "Zipf exponent",
        "cap": "longest history",
    }
    axes = []
    for sweep, words in below.items():
        mine = [row for row in rows if row["sweep"] == sweep]
        line = Line(
            "expected from the popularity",
            [(row[sweep], row["collision_percent"]) for row in mine],
            GREY,
            True,
        )
        axes.append(
            Axes(
                f"collision %, over the {words}",
                words,
                [(row[sweep], shorten(row[sweep])) for row in mine],
                [line],
            )
        )
    drawn = [row for row in rows if row["sweep"] == "drawn"]
    lines = [
        Line(
            name,
            [(row["ranks"], row["collision_percent"]) for row in drawn if row["arm"] == arm],
            ink,
            arm == "expected",
        )
        for arm, name, ink in (
            ("expected", "expected from the popularity", GREY),
            ("drawn", "counted on ids drawn", BLUE),
        )
    ]
    ticks = [(value, str(value)) for value in sorted({row["ranks"] for row in drawn})]
    axes.append(
        Axes("collision %, small enough to draw ids", "ranks of 8 samples, 1M items", ticks, lines)
    )
    return draw_panels(axes, used, note=NOTE)
