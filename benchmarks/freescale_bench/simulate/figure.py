"""The simulator's predictions at the paper's setting, to 4,096 GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from freescale.simulate.verdict import ALL, BASE, UNBALANCED
from freescale_bench.common import drawing as svg
from freescale_bench.common.markdown import Results, single

INKS = {
    BASE: svg.RED,
    f"{BASE}, ids deduplicated": "#e377c2",
    "serial": svg.GREY,
    "serial + balancing": svg.ORANGE,
    "staged": svg.TEAL,
    "serial + hostwire": svg.BROWN,
    "staged + balancing": svg.GREEN,
    UNBALANCED: svg.VIOLET,
    ALL: svg.BLUE,
    # partitioners, with the serial schedule
    "none": svg.GREY,
    "greedy": svg.ORANGE,
    "fixed": "#bcbd22",
    "local": "#17becf",
}


def make_lines(
    rows: Sequence[Mapping[str, Any]],
    figure: str,
    x: str,
    value: Callable[[Mapping[str, Any]], float],
    arms: Sequence[str] = (),
) -> list[svg.Line]:
    """Makes a line per arm of a figure of `freescale bench simulate`."""
    made: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["figure"] == figure and (not arms or row["arm"] in arms):
            made.setdefault(row["arm"], []).append((row[x], value(row)))
    return [svg.Line(name, points, INKS[name], predicted=True) for name, points in made.items()]


def exposed(row: Mapping[str, Any]) -> float:
    return float(sum(row["exposed_ms"].values()))


def straggler(row: Mapping[str, Any]) -> float:
    return float(row["straggler_percent"])


def make_axes_over_lengths(rows: Sequence[Mapping[str, Any]]) -> svg.Axes:
    lines = make_lines(rows, "straggler by length", "cap", straggler)
    return svg.Axes(
        "straggler %, 64 GPUs",
        "longest history",
        [(cap, f"{cap / 1000:g}k") for cap, _ in lines[0].points],
        lines,
    )


def make_axes_over_collisions(rows: Sequence[Mapping[str, Any]]) -> svg.Axes:
    lines = make_lines(rows, "by collisions", "collisions", exposed)
    # 5 % is too close to 0 and 10
    ticks = [(rate, "" if rate == 0.05 else f"{100 * rate:g}") for rate, _ in lines[0].points]
    return svg.Axes(
        "exposed communication, ms, 256 GPUs", "collisions, %", ticks, lines, linear=True
    )


def draw_simulate(used: Results) -> str:
    result = single(used)
    rows = result["rows"]
    gpus = [
        (row["gpus"], _shorten(row["gpus"]))
        for row in rows
        if row["figure"] == "by GPUs" and row["arm"] == BASE
    ]
    one_sample = [row for row in rows if row["figure"] == "one sample"]
    base = {
        row["gpus"]: row["samples_per_second"]
        for row in rows
        if row["figure"] == "by GPUs" and row["arm"] == BASE
    }
    balanced = [
        svg.Line(
            "serial + balancing",
            [(row["gpus"], row["straggler_percent"]) for row in one_sample],
            INKS["serial + balancing"],
            predicted=True,
        )
    ]
    exposing = make_lines(rows, "by GPUs", "gpus", exposed, (BASE, "serial", "staged", ALL))
    faster = make_lines(
        rows, "by GPUs", "gpus", lambda row: row["samples_per_second"] / base[row["gpus"]]
    )
    drawn = [
        make_axes_over_lengths(rows),
        svg.Axes(
            "straggler %",
            "GPUs",
            gpus,
            make_lines(rows, "by GPUs", "gpus", straggler, ("serial", "serial + balancing", ALL)),
        ),
        svg.Axes("exposed communication, ms", "GPUs", gpus, exposing),
        make_axes_over_collisions(rows),
        svg.Axes("speed-up over TorchRec SparseDist", "GPUs", gpus, faster),
        svg.Axes(
            "straggler %, 8,192 samples in all",
            "GPUs",
            [(row["gpus"], _shorten(row["gpus"])) for row in one_sample],
            balanced,
        ),
    ]
    return svg.panels(drawn, used, note="All predicted.")


def _shorten(count: int) -> str:
    return f"{count}" if count < 1000 else f"{count // 1024}k"
