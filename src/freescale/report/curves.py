"""The section about what changes over the steps: loss, metrics, times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from html import escape
from typing import Any

from freescale.config.metrics import (
    COLD,
    COLD_EVENTS,
    COLD_TARGETS,
    REPEATS,
    UNSEEN,
    select_headlines,
)
from freescale.report.charts import Series, draw_lines, render_panel, render_panels
from freescale.report.glossary import explain
from freescale.report.markup import render_name, render_table, render_title
from freescale.report.runs import WARM_UP, Run

_SHOWN = 50  # windows in the table: the last ones
_COUNTS = ("events", "new_users", "new_items", "new_actions", "late", "dropped", "duplicates")
_ROWS = {"admitted": ("dynamic_inserted",), "evicted": ("dynamic_evicted", "dynamic_swept")}
_UNITS = (1, 10**3, 10**6, 10**9)  # units of timestamps, in parts of a second
Points = list[tuple[float, float]]  # step and value


# Of dynamic tables: title, label of the axis, figures that are added up.
_DYNAMIC = (
    ("rows", "rows", ("dynamic_rows",)),
    ("new ids", "ids a step", ("dynamic_inserted",)),
    ("rows that go", "rows a step", ("dynamic_evicted", "dynamic_swept")),
    ("turned away", "ids a step", ("dynamic_turned_away",)),
)


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
    for title, y_label, names in _DYNAMIC:
        add(f"Dynamic tables: {title}", y_label, partial(_add_figures, names))
    if not panels:
        return "<p>Nothing was recorded over the steps.</p>"
    legend = "".join(f"<li>{render_name(place, run)}</li>" for place, run in enumerate(runs))
    legend = f'<ul class="legend">{legend}</ul>' if len(runs) > 1 else ""
    return legend + render_panels(panels) + _render_best(runs) + _render_test_metrics(runs)


def _read_loss(run: Run) -> Points:
    return [
        (entry["step"], entry["loss"]) for entry in run.metrics if entry.get("loss") is not None
    ]


def _list_validation_metrics(run: Run) -> list[str]:
    found = [name for entry in run.metrics for name in entry.get("validation", {}).get("model", {})]
    return select_headlines(dict.fromkeys(found))


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


def _add_figures(names: Sequence[str], run: Run) -> Points:
    parts = [_read_figure(name, run) for name in names]
    return [(of[0][0], sum(value for _, value in of)) for of in zip(*parts, strict=True)]


def _read_exposed(run: Run) -> Points:
    return [
        (figures["step"], 100 * sum(figures["exposed_ms"].values()) / figures["step_ms"])
        for figures in run.steps[WARM_UP:]
        if figures["step_ms"]
    ]


def _render_best(runs: Sequence[Run]) -> str:
    """The best evaluation of the validation part, of runs that compare them."""
    parts = []
    for run in runs:
        if (best := run.best) is not None:
            name = f"{run.name}: " if len(runs) > 1 else ""
            kept = "; its checkpoint is kept" if best["kept"] else ""
            words = f"step {best['step']:,}, {best['metric']} {best['value']:.4f}{kept}"
            parts.append(f"<p>{escape(f'{name}Best on the validation part: {words}.')}</p>")
    return "".join(parts)


_KINDS = {"": "all items", UNSEEN: "unseen items", COLD: "cold items"}


def _render_test_metrics(runs: Sequence[Run]) -> str:
    """A table of the test metrics of the model and of the baselines: among all items, and among
    those that the history does not hold."""
    columns: list[tuple[str, dict[str, Any]]] = []
    notes: list[str] = []
    for run in runs:
        name = f"{run.name}: " if len(runs) > 1 else ""
        tests = (entry for entry in reversed(run.metrics) if "test" in entry)
        entry: dict[str, Any] = next(tests, {})
        test: dict[str, dict[str, Any]] = entry.get("test", {})
        for who, values in test.items():
            kinds = {kind: _select_kind(values, kind) for kind in _KINDS}
            parts = _KINDS if kinds[UNSEEN] else {"": ""}
            columns += [
                (f"{name}{who}{', ' if words else ''}{words}", kinds[kind])
                for kind, words in parts.items()
                if kinds[kind]
            ]
        if (share := test.get("model", {}).get(REPEATS)) is not None:
            words = f"{100 * share:.1f} % of the targets are repeats: the history holds them."
            notes.append(name + words)
        if share := test.get("model", {}).get(COLD_TARGETS):
            about = f"items with at most {COLD_EVENTS} training events"
            notes.append(f"{name}{100 * share:.1f} % of the targets are cold: {about}.")
        if entry.get("of_step") is not None:
            notes.append(f"{name}Evaluated with the checkpoint of step {entry['of_step']:,}.")
    names = dict.fromkeys(name for _, values in columns for name in values)
    if not names:
        return ""
    rows = [
        [explain(n), *("-" if v.get(n) is None else f"{v[n]:.4f}" for _, v in columns)]
        for n in names
    ]
    head = ["metric", *(explain(title) for title, _ in columns)]
    words = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return "<h3>Test part</h3>" + words + render_table(head, rows)


def _select_kind(values: dict[str, Any], kind: str) -> dict[str, Any]:
    """The metrics among all items (kind "") or of another kind, by their names without it."""
    found = {}
    for name, value in values.items():
        suffix = next((suffix for suffix in _KINDS if suffix and name.endswith(suffix)), "")
        if name not in (REPEATS, COLD_TARGETS) and suffix == kind:
            found[name.removesuffix(suffix)] = value
    return found


def render_windows(runs: Sequence[Run]) -> str:
    """Charts and a table for each run that follows a source; empty if none does."""
    parts = []
    for place, run in enumerate(runs):
        windows = [entry for entry in run.metrics if isinstance(entry.get("stream"), dict)]
        if windows:
            parts.append(render_title(runs, place) + _render(run, windows))
    return "".join(parts)


def _render(run: Run, lines: Sequence[dict[str, Any]]) -> str:
    metrics = {
        entry["window"]["number"]: entry["validation"].get("model", {})
        for entry in run.metrics
        if "validation" in entry and "window" in entry
    }
    moved = _sum_rows(run, [line["step"] for line in lines])
    streamed = [line["stream"] | line["stream"].get("values", {}) for line in lines]
    windows = [window | rows for window, rows in zip(streamed, moved, strict=True)]
    names = select_headlines(dict.fromkeys(n for found in metrics.values() for n in found))
    for window in windows:
        window |= metrics.get(window["number"], {})
    features = dict.fromkeys(name for each in streamed for name in each.get("values", ()))
    shown, exact = [*names, *_COUNTS, *_ROWS, *features, "lag"], {*names, *features}
    shown = [name for name in shown if any(window.get(name) is not None for window in windows)]
    panels = []
    for name in shown:
        points = [(w["number"], w[name]) for w in windows if w.get(name) is not None]
        drawn = draw_lines([Series(run.name, "r-0", points)], _label(name), zero=name not in names)
        panels.append(render_panel(f"Windows: {_label(name)}", drawn))
    rows = [
        [
            f"{window['number']:,}",
            escape(_format_time(window["from"])),
            *(_format(window.get(n), 4 * (n in exact) or n == "lag") for n in shown),
        ]
        for window in windows[-_SHOWN:]
    ]
    head = ["window", "from (UTC)", *(escape(_label(name)) for name in shown)]
    return render_panels(panels) + render_table(head, rows)


def _sum_rows(run: Run, ends: Sequence[int]) -> list[dict[str, float]]:
    """Rows that came to dynamic tables and went, in the steps of each window. `ends`: last
    steps."""
    found: list[dict[str, float]] = [{} for _ in ends]
    for figures in run.steps:
        place = bisect_left(ends, figures["step"])
        for name, keys in _ROWS.items():
            if place < len(ends) and all(key in figures for key in keys):
                count = sum(figures[key] for key in keys)
                found[place][name] = found[place].get(name, 0) + count
    return found


def _label(name: str) -> str:
    return "lag (s)" if name == "lag" else name.replace("_", " ")


def _format(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{int(digits)}f}"


def _format_time(time: int) -> str:
    """A moment, or the number itself if it is none."""
    parts = next((unit for unit in _UNITS if 1e8 <= time / unit < 1e10), None)
    if parts is None:
        return f"{time:,}"
    return f"{datetime.fromtimestamp(time / parts, UTC):%Y-%m-%d %H:%M:%S}"
