"""One self-contained HTML page from one run or several: run data in, text out. `freescale report`
writes it to a file.

Words, tables and curves are made here; static/timeline.js draws the timeline from the data in the
page. Nothing is loaded from anywhere, and every number comes from the run's folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from freescale.report.curves import balance, curves
from freescale.report.runs import Run
from freescale.report.sections import COLOURED, machines, settings, step_time, summary, traffic
from freescale.report.timeline import timeline

_SECTIONS = (
    ("time", "Where a step's time goes", step_time),
    ("timeline", "Two steps", lambda runs: _timelines(runs)),
    ("balance", "Balance of the ranks", balance),
    ("traffic", "Traffic and collisions", traffic),
    ("curves", "Over the steps", curves),
    ("settings", "Settings", settings),
    ("machine", "Machine", machines),
)

_HELP = (
    '<p class="help">Wheel, pinch or the buttons zoom; drag moves; drag on the time axis (or with '
    "shift) zooms into a part; arrow "
    "keys walk from event to event. Hatched: compute stands still. Dashed: a step begins. The "
    "whole trace, trace.json.gz, opens in "
    "Perfetto.</p>"
)


def page(runs: Sequence[Run]) -> str:
    """The report."""
    drawn = []
    for run in runs:
        compute = run.ledger["compute_ms_per_rank"] if run.measured else [0.0]
        drawn.append(timeline(run.events, compute.index(max(compute))))
    parts = "".join(
        f'<section id="{name}"><h2>{title}</h2>{made(runs)}</section>'
        for name, title, made in _SECTIONS
    )
    names = ", ".join(run.name for run in runs)
    fill = {
        "TITLE": escape(names),
        "COLOURED": " ".join(sorted(COLOURED)),
        "STYLE": _asset("style.css"),
        "LINKS": "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in _SECTIONS),
        "MISSING": _missing(runs),
        "SUMMARY": summary(runs),
        "SECTIONS": parts,
        # Anyone (and the tests) can read here what the page was made from.
        "LEDGERS": _block([{"name": run.name, "ledger": run.ledger} for run in runs]),
        "TIMELINES": _block(drawn),
        "SCRIPT": "".join(_asset(name) for name in ("timeline.js", "timeline_input.js", "page.js")),
    }
    text = _asset("page.html")
    pieces = text.split("@@")  # @@NAME@@: what is filled in is not searched again
    return "".join(piece if place % 2 == 0 else fill[piece] for place, piece in enumerate(pieces))


def _timelines(runs: Sequence[Run]) -> str:
    parts = []
    for place, run in enumerate(runs):
        title = (
            f'<h3><i class="run r-{place % 8}"></i>{escape(run.name)}</h3>' if len(runs) > 1 else ""
        )
        empty = "" if run.events else "<p>The run has no trace.</p>"
        parts.append(
            f'{title}{empty}<div class="timeline" data-run="{place}" '
            f'data-name="{escape(run.name, quote=True)}"></div>'
        )
    return (
        _HELP
        + "".join(parts)
        + (
            "<noscript><p>The timeline needs JavaScript; trace.json.gz opens "
            "in Perfetto too.</p></noscript>"
        )
    )


def _missing(runs: Sequence[Run]) -> str:
    found = [(run.name, words) for run in runs for words in run.missing]
    if not found:
        return ""
    several = len(runs) > 1
    rows = "".join(
        f"<li>{escape(f'{name}: {words}' if several else words)}</li>" for name, words in found
    )
    return f'<aside id="missing"><b>Missing in the run\'s folder</b><ul>{rows}</ul></aside>'


def _block(data: object) -> str:
    """JSON inside a script element: no `<` may end it, and JavaScript knows no NaN."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [finite(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(data), separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files("freescale.report") / "static" / name).read_text(encoding="utf-8")
