"""The top of the report: key figures, as tiles for one run or as a table for several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    def show_figure(path: str, show: Callable[[Any], str], place: int, run: Run) -> str:
        return format_figure(place, path, run.ledger, show)

    def show_throughput(place: int, run: Run) -> str:
        words = format_figure(place, "samples_per_second", run.ledger, "{:,.0f}".format)
        return words + _compare_throughput(runs[0], run)

    names = dict.fromkeys(name for run in runs for name in _find_quality(run))
    shown: list[tuple[str, Callable[[int, Run], str]]] = [
        (name, partial(_show_quality, name)) for name in list(names)[:_METRICS]
    ]
    if any(run.best for run in runs):
        shown.append(("best on validation", lambda place, run: _show_best(run)))
    shown.append(("last loss", lambda place, run: _show_last_loss(run)))
    shown.append(("samples/s", show_throughput))
    shown += [(name, partial(show_figure, path, show)) for name, path, show in _FIGURES]
    shown += [
        (name, partial(_show_device_figure, key, show))
        for name, key, show in _DEVICE_FIGURES
        if any(_find_device_figure(run, key) is not None for run in runs)
    ]
    shown.append(("ranks", partial(show_figure, "ranks", str)))
    shown.append(("measured steps", partial(show_figure, "measured_steps", "{:,}".format)))
    if len(runs) == 1:
        tiles = "".join(
            f"<div><dt>{explain(name)}</dt><dd>{show(0, runs[0])}</dd></div>"
            for name, show in shown
        )
        return f'<dl class="tiles">{tiles}</dl>'
    head = ["", *(render_name(place, run) for place, run in enumerate(runs))]
    rows = [
        [explain(name), *(show(place, run) for place, run in enumerate(runs))]
        for name, show in shown
    ]
    return render_table(head, rows, "summary")


def _find_quality(run: Run) -> dict[str, float]:
    """Headline metrics of the last test evaluation, or of the last validation if there is none."""
    for part in ("test", "validation"):
        evaluated = (entry[part]["model"] for entry in reversed(run.metrics) if part in entry)
        if found := next(evaluated, None):
            shown = {name: value for name, value in found.items() if value is not None}
            return {f"{part} {name}": shown[name] for name in select_headlines(shown)}
    return {}


def _show_best(run: Run) -> str:
    return NONE if run.best is None else f"step {run.best['step']:,}"


def _show_quality(name: str, place: int, run: Run) -> str:
    value = _find_quality(run).get(name)
    return NONE if value is None else f"{value:.4f}"


def _find_device_figure(run: Run, key: str) -> float | None:
    """A figure of the last profile; a resumed run has several."""
    return next((entry[key] for entry in reversed(run.metrics) if key in entry), None)


def _show_device_figure(key: str, show: Callable[[float], str], place: int, run: Run) -> str:
    value = _find_device_figure(run, key)
    return NONE if value is None else show(value)


def _compare_throughput(first: Run, run: Run) -> str:
    """The speed-up over the first run; empty for the first run itself."""
    base, own = (one.ledger.get("samples_per_second") for one in (first, run))
    if run is first or not base or own is None:
        return ""
    return f" <small>({own / base:.2f} x)</small>"


def _show_last_loss(run: Run) -> str:
    losses = (entry.get("loss") for entry in reversed(run.metrics))
    loss = next((loss for loss in losses if loss is not None), None)
    return NONE if loss is None else f"{loss:.4f}"
