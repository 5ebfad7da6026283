"""Renders one self-contained HTML page from one run or several.

The sections are modules of this package; static/timeline.js draws the timeline from the data in the
page. The page loads nothing from anywhere, and every number comes from the run's folder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from freescale.report.curves import render_curves
from freescale.report.environment import render_machines, render_settings
from freescale.report.glossary import find_term, render_definitions
from freescale.report.markup import COLOURED, render_table, render_title
from freescale.report.overview import render_overview
from freescale.report.rank_balance import render_balance
from freescale.report.runs import Run
from freescale.report.step_time import render_step_time
from freescale.report.timeline import build_timeline
from freescale.report.traffic import render_traffic
from freescale.report.windows import render_windows

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
