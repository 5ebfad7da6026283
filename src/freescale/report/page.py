"""Renders one self-contained HTML page from one run or several.

The sections are modules of this package; static/timeline.js draws the timeline from the data in the
page. The page loads nothing from anywhere, and every number comes from the run's folder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from freescale.config.metrics import select_headlines
from freescale.report.curves import render_curves, render_windows
from freescale.report.glossary import explain, find_term, render_definitions
from freescale.report.markup import (
    BARS,
    COLOURED,
    NONE,
    format_bytes,
    format_figure,
    render_cards,
    render_name,
    render_table,
    render_title,
)
from freescale.report.rank_balance import render_balance
from freescale.report.runs import Run
from freescale.report.step import render_step_time, render_traffic
from freescale.report.timeline import build_timeline


def render_settings(runs: Sequence[Run]) -> str:
    """Every setting; those in which the runs differ first."""
    names = dict.fromkeys(
        (part, name) for run in runs for part in run.config for name in _list_settings(run, part)
    )
    if not names:
        return "<p>Unknown: there is no config.json.</p>"
    values = {
        (part, name): [
            _list_settings(run, part).get(name) if run.config else "unknown" for run in runs
        ]
        for part, name in names
    }
    differ = [key for key in values if any(value != values[key][0] for value in values[key])]
    order = [*differ, *(key for key in values if key not in differ)]
    rows = [
        [f"{escape(part)}.{escape(name)}", *(escape(str(value)) for value in values[part, name])]
        for part, name in order
    ]
    head = ["setting", *(escape(run.name) for run in runs)]
    several = (
        f"<p>The runs differ in the first {len(differ)}.</p>" if len(runs) > 1 and differ else ""
    )
    return (
        f"<details><summary>{len(rows)} settings</summary>"
        f"{several}{render_table(head, rows, 'words')}</details>" + _render_features(runs)
    )


def _render_features(runs: Sequence[Run]) -> str:
    """The features of the runs that have any."""
    rows = []
    for run in runs:
        for fitted in run.features:
            feature = fitted["feature"]
            about = {
                "numeric": f"{len(fitted['edges']) + 1} buckets",
                "cross": f"{fitted['rows']:,} rows",
                "vector": f"{fitted['width']:,} numbers",
            }.get(feature["kind"], f"{len(fitted['categories']):,} categories")
            columns = " and ".join(feature["columns"])
            words = feature["source"], feature["name"], feature["kind"], columns, about
            rows.append([escape(run.name), *map(escape, words)])
    if not rows:
        return ""
    head = ["run", "of", "feature", "kind", "columns", "size"]
    return f"<h3>Features</h3>{render_table(head, rows, 'words')}"


def _list_settings(run: Run, part: str) -> Mapping[str, Any]:
    """The settings in a part of config.json; a part may also be a single value."""
    found = run.config.get(part)
    return found if isinstance(found, Mapping) else {"": found}


_NAMES = {
    "cpu": "CPU",
    "gpu": "GPU",
    "memory_gib": "memory, GiB",
    "gpu_memory_gib": "GPU memory, GiB",
}


def render_machines(runs: Sequence[Run]) -> str:
    return render_cards(runs, _render_machines_of_run, needs_figures=False)


def _render_machines_of_run(place: int, run: Run) -> str:
    rows: list[list[str]] = []
    for machine in run.ledger.get("machines", []):
        known = {
            name: value for name, value in machine.items() if name not in ("ranks", "versions")
        } | machine.get("versions", {})
        rows.append(["ranks on it", escape(_list_ranks(machine["ranks"]))])
        rows += [
            [escape(_NAMES.get(name, name.replace("_", " "))), escape(str(value))]
            for name, value in known.items()
            if value is not None
        ]
    for rank, peak in enumerate(run.ledger.get("peak_memory_bytes_per_rank", [])[:BARS]):
        path = f"peak_memory_bytes_per_rank/{rank}"
        shown = [
            f"{escape(where)} {format_figure(place, f'{path}/{where}', run.ledger, _format_mib)}"
            for where in peak
        ]
        rows.append([explain(f"peak memory, rank {rank}"), ", ".join(shown)])
    return render_table(["", "found"], rows, "words") if rows else "<p>Not recorded.</p>"


def _list_ranks(ranks: Sequence[int]) -> str:
    """How many, and which: `1 (rank 0)`, `4 (ranks 0 to 3)`."""
    first, last = min(ranks), max(ranks)
    if len(ranks) == 1:
        return f"1 (rank {first})"
    whole = len(ranks) > 2 and list(ranks) == list(range(first, last + 1))
    named = f"{first} to {last}" if whole else ", ".join(map(str, ranks))
    return f"{len(ranks)} (ranks {named})"


def _format_mib(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"


# Id, title and renderer.
_SECTIONS = (
    ("time", "Where a step's time goes", render_step_time),
    ("timeline", "Two steps", lambda runs: _render_timelines(runs)),
    ("balance", "Balance of the ranks", render_balance),
    ("traffic", "Traffic and collisions", render_traffic),
    ("curves", "Over the steps", render_curves),
    ("windows", "Windows of the stream", render_windows),  # empty for other runs
    ("restarts", "Restarts", lambda runs: _render_restarts(runs)),  # empty for most runs: left out
    ("settings", "Settings", render_settings),
    ("machine", "Machine", render_machines),
)

_HELP = (
    '<p class="help">Wheel, pinch or the buttons zoom; drag moves; drag on the time axis (or with '
    "shift) zooms into a part; arrow keys walk from event to event. Hatched: compute stands "
    "still. Dashed: a step begins. The whole trace, trace.json.gz, opens in Perfetto.</p>"
)

_MISSING = "<b>Missing in the run's folder</b>"
_RESTARTS = ["ended (UTC)", "at step", "why", "until it went on", "from step", "steps made again"]


def render_page(runs: Sequence[Run]) -> str:
    """Renders the report as HTML. The other runs are compared with the first."""
    timelines = []
    for run in runs:
        compute = run.ledger["compute_ms_per_rank"] if run.measured else [0.0]
        timelines.append(build_timeline(run.events, compute.index(max(compute))))
    sections = [(name, title, render(runs)) for name, title, render in _SECTIONS]
    sections = [section for section in sections if section[2]]
    parts = "".join(
        f'<section id="{name}"><h2>{title}</h2>{body}</section>' for name, title, body in sections
    )
    names = ", ".join(run.name for run in runs)
    summary, drawn = render_overview(runs), _find_drawn_terms(timelines)
    used = {*re.findall(r'data-term="([^"]+)"', summary + parts), *drawn.values()}
    fill = {
        "TITLE": escape(names),
        "COLOURED": " ".join(sorted(COLOURED)),
        "STYLE": _read_asset("style.css"),
        "DRAWN_TERMS": escape(json.dumps(drawn), quote=True),
        "LINKS": "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections),
        "TERMS": render_definitions(used),
        "NOTES": _render_aside("notes", "", runs, [run.notes for run in runs]),
        "MISSING": _render_aside("missing", _MISSING, runs, [run.missing for run in runs]),
        "SUMMARY": summary,
        "SECTIONS": parts,
        # The page's data, for readers and tests.
        "LEDGERS": _embed_json([{"name": run.name, "ledger": run.ledger} for run in runs]),
        "TIMELINES": _embed_json(timelines),
        "SCRIPT": "".join(
            _read_asset(name) for name in ("tip.js", "timeline.js", "timeline_input.js", "page.js")
        ),
    }
    text = _read_asset("page.html")
    pieces = text.split("@@")  # @@NAME@@: what is filled in is not searched again
    return "".join(piece if place % 2 == 0 else fill[piece] for place, piece in enumerate(pieces))


def _find_drawn_terms(timelines: Sequence[dict[str, Any] | None]) -> dict[str, str]:
    """The slug of the term behind each name in the timelines, lanes among them."""
    shown = [timeline for timeline in timelines if timeline]
    names = {event[3] for timeline in shown for event in timeline["events"]}
    names |= {lane for timeline in shown for lane, _ in timeline["lanes"]}
    return {name: term.slug for name in sorted(names) if (term := find_term(name))}


def _render_timelines(runs: Sequence[Run]) -> str:
    parts = []
    for place, run in enumerate(runs):
        empty = "" if run.events else "<p>The run has no trace.</p>"
        parts.append(
            f'{render_title(runs, place)}{empty}<div class="timeline" data-run="{place}" '
            f'data-name="{escape(run.name, quote=True)}"></div>'
        )
    without = "The timeline needs JavaScript; trace.json.gz opens in Perfetto too."
    return f"{_HELP}{''.join(parts)}<noscript><p>{without}</p></noscript>"


def _render_restarts(runs: Sequence[Run]) -> str:
    """A table for each run that was started again; empty if none was."""
    parts = []
    for place, run in enumerate(runs):
        found = [entry for entry in run.metrics if isinstance(entry.get("restart"), dict)]
        if found:
            table = render_table(_RESTARTS, [_list_restart(entry) for entry in found], "words")
            parts.append(render_title(runs, place) + table)
    return "".join(parts)


def _list_restart(entry: dict[str, Any]) -> list[str]:
    restart = entry["restart"]
    ended = str(restart.get("ended", "")).replace("T", " ").removesuffix("+00:00")
    return [
        escape(ended),
        f"{restart['ending']['step']:,}",
        escape(restart["why"]),
        f"{restart['seconds']:,.1f} s",
        f"{entry['step']:,}",
        f"{restart['repeated_steps']:,}",
    ]


def _render_aside(name: str, title: str, runs: Sequence[Run], listed: Sequence[list[str]]) -> str:
    """A list of sentences about the runs, with the run's name if there are several runs; empty if
    there is nothing to say."""
    found = [
        f"{run.name}: {words}" if len(runs) > 1 else words
        for run, of_run in zip(runs, listed, strict=True)
        for words in of_run
    ]
    items = "".join(f"<li>{escape(words)}</li>" for words in found)
    return f'<aside id="{name}">{title}<ul>{items}</ul></aside>' if items else ""


def _embed_json(data: object) -> str:
    """JSON inside a script element: no `<` may end it, and JavaScript knows no NaN."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [finite(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(data), separators=(",", ":")).replace("<", "\\u003c")


def _read_asset(name: str) -> str:
    return (files("freescale.report") / "static" / name).read_text(encoding="utf-8")


# ---- the top: key figures, as tiles for one run or as a table for several

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
    for name, key, form in _DEVICE_FIGURES:  # those of the last profile; a resumed run has several
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
