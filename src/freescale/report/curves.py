"""The section about what changes over the steps: loss, metrics, times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from freescale.report.charts import Series, draw_lines, render_panel, render_panels
from freescale.report.glossary import explain
from freescale.report.markup import render_name, render_table
from freescale.report.runs import WARM_UP, Run

Points = list[tuple[float, float]]  # step and value


def render_curves(runs: Sequence[Run]) -> str:
    """Renders a chart per figure, with a line per run."""
    panels: list[str] = []

    def add(title: str, y_label: str, read: Callable[[Run], Points], zero: bool = True) -> None:
        series = [Series(run.name, f"r-{place % 8}", read(run)) for place, run in enumerate(runs)]
        series = [one for one in series if one.points]
        if series:
            panels.append(render_panel(title, draw_lines(series, y_label, zero=zero)))

    add("Loss", "loss", _read_loss, zero=False)
    for name in dict.fromkeys(name for run in runs for name in _list_validation_metrics(run)):
        add(f"Validation {name}", name, partial(_read_validation, name), zero=False)
    add("Step time", "ms", partial(_read_figure, "step_ms"))
    add("Straggler", "% of the step", partial(_read_figure, "straggler_percent"))
    add("Exposed communication", "% of the step", _read_exposed)
    add("Collisions", "% of requests", partial(_read_figure, "collision_percent"))
    if not panels:
        return "<p>Nothing was recorded over the steps.</p>"
    legend = "".join(f"<li>{render_name(place, run)}</li>" for place, run in enumerate(runs))
    legend = f'<ul class="legend">{legend}</ul>' if len(runs) > 1 else ""
    return legend + render_panels(panels) + _render_test_metrics(runs)


def _read_loss(run: Run) -> Points:
    return [
        (entry["step"], entry["loss"]) for entry in run.metrics if entry.get("loss") is not None
    ]


def _list_validation_metrics(run: Run) -> list[str]:
    return [name for entry in run.metrics for name in entry.get("validation", {}).get("model", {})]


def _read_validation(name: str, run: Run) -> Points:
    found = [
        (entry["step"], entry["validation"]["model"].get(name))
        for entry in run.metrics
        if "validation" in entry
    ]
    return [(step, value) for step, value in found if value is not None]


def _read_figure(name: str, run: Run) -> Points:
    return [
        (figures["step"], figures[name])
        for figures in run.steps[WARM_UP:]
        if figures.get(name) is not None
    ]


def _read_exposed(run: Run) -> Points:
    return [
        (figures["step"], 100 * sum(figures["exposed_ms"].values()) / figures["step_ms"])
        for figures in run.steps[WARM_UP:]
        if figures["step_ms"]
    ]


def _render_test_metrics(runs: Sequence[Run]) -> str:
    """The test part's metrics of the model and of the baselines, as a table."""
    columns: list[tuple[str, dict[str, Any]]] = []
    for run in runs:
        tests = (entry["test"] for entry in reversed(run.metrics) if "test" in entry)
        test: dict[str, dict[str, Any]] = next(tests, {})
        columns += [
            (f"{run.name}: {who}" if len(runs) > 1 else who, values) for who, values in test.items()
        ]
    names = dict.fromkeys(name for _, values in columns for name in values)
    if not names:
        return ""
    rows = [
        [explain(n), *("-" if v.get(n) is None else f"{v[n]:.4f}" for _, v in columns)]
        for n in names
    ]
    head = ["metric", *(explain(title) for title, _ in columns)]
    return "<h3>Test part</h3>" + render_table(head, rows)
