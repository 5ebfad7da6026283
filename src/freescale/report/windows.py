"""The section about the windows of a run that follows a source: what came, and how the model met
it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from freescale.config.metrics import select_headlines
from freescale.report.charts import Series, draw_lines, render_panel, render_panels
from freescale.report.markup import render_table, render_title
from freescale.report.runs import Run

_SHOWN = 50  # windows in the table: the last ones
_COUNTS = ("events", "new_users", "new_items", "new_actions", "late", "dropped", "duplicates")
_ROWS = {"admitted": ("dynamic_inserted",), "evicted": ("dynamic_evicted", "dynamic_swept")}
_UNITS = (1, 10**3, 10**6, 10**9)  # units of timestamps, in parts of a second


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
    windows = [line["stream"] | rows for line, rows in zip(lines, moved, strict=True)]
    names = select_headlines(dict.fromkeys(n for found in metrics.values() for n in found))
    for window in windows:
        window |= metrics.get(window["number"], {})
    shown = [*names, *_COUNTS, *_ROWS, "lag"]
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
            *(_format(window.get(name), 4 * (name in names) or name == "lag") for name in shown),
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
