"""The top of the report: key figures, as tiles for one run or as a table for several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from freescale.config.metrics import select_headlines
from freescale.report.glossary import explain
from freescale.report.markup import NONE, format_bytes, format_figure, render_name, render_table
from freescale.report.runs import Run

# Displayed name, path in the ledger, format.
_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("step, mean", "step_ms/mean", "{:,.1f} ms".format),
    ("step, median", "step_ms/median", "{:,.1f} ms".format),
    ("straggler", "straggler_percent", "{:.1f} %".format),
    ("exposed communication", "exposed_percent", "{:.1f} %".format),
    ("imbalance of compute", "imbalance", "{:.3f}".format),
    ("sent a step, all ranks", "bytes_per_step", lambda sent: format_bytes(sum(sent.values()))),
    ("collisions", "collision_percent", "{:.1f} %".format),
)
# For GPU runs. Displayed name, key in metrics.jsonl, format.
_DEVICE_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("device busy", "device_busy", "{:.0%}".format),
    ("kernels launched a step", "launches", "{:,.0f}".format),
    ("compilations after step 1", "compilations", "{:,.0f}".format),
)
_METRICS = 6  # quality metrics shown, at most


def render_overview(runs: Sequence[Run]) -> str:
    def show(values: Sequence[Any], form: Callable[[Any], str]) -> list[str]:
        return [NONE if value is None else form(value) for value in values]

    def show_figure(path: str, form: Callable[[Any], str]) -> list[str]:
        return [format_figure(place, path, run.ledger, form) for place, run in enumerate(runs)]

    quality = [_find_quality(run) for run in runs]
    names = dict.fromkeys(name for of_run in quality for name in of_run)
    # by displayed name: a cell for each run
    rows = {
        name: show([of_run.get(name) for of_run in quality], "{:.4f}".format)
        for name in list(names)[:_METRICS]
    }
    if any(run.best for run in runs):
        rows["best on validation"] = show([run.best for run in runs], "step {0[step]:,}".format)
    rows["last loss"] = show([_find_last(run, "loss") for run in runs], "{:.4f}".format)
    rates = show_figure("samples_per_second", "{:,.0f}".format)
    rows["samples/s"] = [
        rate + _compare_throughput(runs[0], run) for rate, run in zip(rates, runs, strict=True)
    ]
    rows |= {name: show_figure(path, form) for name, path, form in _FIGURES}
    for name, key, form in _DEVICE_FIGURES:  # of the last profile; a resumed run has several
        values = [_find_last(run, key) for run in runs]
        if any(value is not None for value in values):
            rows[name] = show(values, form)
    rows["ranks"] = show_figure("ranks", str)
    rows["measured steps"] = show_figure("measured_steps", "{:,}".format)
    if len(runs) == 1:
        tiles = "".join(
            f"<div><dt>{explain(name)}</dt><dd>{cell}</dd></div>" for name, [cell] in rows.items()
        )
        return f'<dl class="tiles">{tiles}</dl>'
    head = ["", *(render_name(place, run) for place, run in enumerate(runs))]
    return render_table(head, [[explain(name), *row] for name, row in rows.items()], "summary")


def _find_quality(run: Run) -> dict[str, float]:
    """Headline metrics of the last test evaluation, or of the last validation if there is none."""
    for part in ("test", "validation"):
        evaluated = (entry[part]["model"] for entry in reversed(run.metrics) if part in entry)
        if found := next(evaluated, None):
            shown = {name: value for name, value in found.items() if value is not None}
            return {f"{part} {name}": shown[name] for name in select_headlines(shown)}
    return {}


def _find_last(run: Run, key: str) -> float | None:
    """The last value of a figure in metrics.jsonl."""
    values = (entry.get(key) for entry in reversed(run.metrics))
    return next((value for value in values if value is not None), None)


def _compare_throughput(first: Run, run: Run) -> str:
    """The speed-up over the first run; empty for the first run itself."""
    base, own = (one.ledger.get("samples_per_second") for one in (first, run))
    if run is first or not base or own is None:
        return ""
    return f" <small>({own / base:.2f} x)</small>"
