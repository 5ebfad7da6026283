"""The staged benchmark on two hosts: exposed communication and samples/s over collisions and
lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from freescale.simulate.verdict import ALL
from freescale_bench.common import drawing as svg
from freescale_bench.common.markdown import Results
from freescale_bench.simulate.figure import make_axes_over_collisions

INK = {"serial": svg.GREY, "TorchRec": svg.RED, "stale": svg.TEAL, "staged": "#2f4b7c"}
NAMES = {
    "serial": "serial",
    "TorchRec": "TorchRec TrainPipelineSparseDist",
    "stale": "stale (inexact: the control)",
    "staged": "staged",
}


def make_line(rows: Sequence[Mapping[str, Any]], arm: str, figure: str, over: str) -> svg.Line:
    """Makes the line of one arm: medians, with bars from the 20th to the 80th percentile."""
    mine = sorted((row for row in rows if row["arm"].split()[0] == arm), key=lambda row: row[over])
    points = [(row[over], row[figure]["median"]) for row in mine]
    return svg.Line(
        NAMES[arm],
        points,
        INK[arm],
        bars=[(row[over], row[figure]["p20"], row[figure]["p80"]) for row in mine],
    )


def draw_curves(used: Results) -> str:
    """Draws exposed communication and samples/s over the collision rate."""
    rows = [row for row in used["staged-hosts"]["rows"] if row.get("sweep") == "collisions"]
    return svg.panels(
        [
            _make_axes(
                rows,
                "exposed_embedding_ms",
                "collisions",
                "Exposed embedding communication, ms a step",
                380,
            ),
            _make_axes(rows, "samples_per_second", "collisions", "Samples/s", 380),
        ],
        used,
        note=(
            "Measured. Bars: 20th to 80th percentile. Charging counts and dense gradients to "
            "staged, too: docs/how/staged.md."
        ),
    )


def draw_exposed(used: Results) -> str:
    """Draws exposed communication: measured over the collision rate and the history length, and
    predicted over the collision rate on 256 GPUs."""
    rows = [row for row in used["staged-hosts"]["rows"] if "collisions" in row]
    rates = [row for row in rows if row["sweep"] == "collisions"]
    # the sweep of lengths, with its middle from the sweep of rates
    lengths = [row for row in rows if row["collisions"] == 10]
    simulated = make_axes_over_collisions(used["simulate-paper"]["rows"])
    names = {"serial": "serial, predicted", ALL: "all techniques, predicted"}
    predicted = [replace(line, name=names[line.name]) for line in simulated.lines]
    axes = [
        _make_axes(
            rates,
            "exposed_embedding_ms",
            "collisions",
            "measured: exposed ids, rows and gradients, ms",
            340,
        ),
        _make_axes(rates, "exposed_all_ms", "collisions", "measured: exposed, all kinds, ms", 340),
        _make_axes(lengths, "exposed_all_ms", "length", "measured: exposed, all kinds, ms", 340),
        replace(
            simulated,
            title="predicted, 256 GPUs: exposed, all kinds, ms",
            lines=predicted,
            wide=340,
        ),
    ]
    return svg.panels(axes, used, columns=2)


def _make_axes(
    rows: Sequence[Mapping[str, Any]], figure: str, over: str, title: str, wide: float
) -> svg.Axes:
    below = {
        "collisions": "requested rows that the batch before also reads, %",
        "length": "events of a history, 10 % collisions",
    }
    values = sorted({row[over] for row in rows})
    # 5 % is too close to 0 and 10
    ticks = [(value, "" if value == 5 else f"{value}") for value in values]
    return svg.Axes(
        title,
        below[over],
        ticks,
        [make_line(rows, arm, figure, over) for arm in INK],
        linear=True,
        wide=wide,
    )
