"""HTML that the sections of the report share: tables, cards, and numbers of the ledger that carry
their place in it (`data-figure`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from freescale.report.runs import Run

BARS = 32  # ranks with a bar or a row, at most
NONE = '<span class="none">-</span>'
# Names that have a colour of their own in static/style.css; all others share one.
_WORK = "forward backward optimizer lookup update-rows deduplicate compare data agree balance"
_WAITS = "arrive other straggler exposed lanes"
_TRAFFIC = "counts ids rows gradients samples dense"
COLOURED = frozenset(f"{_WORK} {_WAITS} {_TRAFFIC}".split())


def colour_class(name: str) -> str:
    """The CSS class with the colour of a span, a wait or a kind of traffic."""
    slug = name.replace(" ", "-")
    return f"k-{slug if slug in COLOURED else 'other'}"


def format_bytes(value: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:,.2f} {name}"
    return f"{value:,.0f} B"


def format_figure(
    run: int, path: str, ledger: Mapping[str, Any], show: Callable[[Any], str]
) -> str:
    """Shows a number of the ledger with its place there (`path`, for example `exposed_ms/rows`), or
    a dash if it is missing. `run`: the number of the run on the page."""
    value: Any = ledger
    for part in path.split("/"):
        value = value[int(part)] if isinstance(value, list) else value.get(part)
        if value is None:
            return NONE
    return f"<span {format_place(run, path, value)}>{escape(show(value))}</span>"


def format_place(run: int, path: str, value: Any) -> str:
    """Attributes that name the ledger entry an element shows."""
    words = escape(json.dumps(value), quote=True)
    return f'data-run="{run}" data-figure="{escape(path, quote=True)}" data-value="{words}"'


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str = "") -> str:
    """Renders a table whose cells are HTML: words in the first column, numbers in the others."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(f"<td>{cell}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{name}">'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def render_name(place: int, run: Run) -> str:
    """A run's name behind a dot in the run's colour."""
    return f'<i class="run r-{place % 8}"></i>{escape(run.name)}'


def render_title(runs: Sequence[Run], place: int) -> str:
    """The heading of a run's part of the page; empty if there is one run only."""
    return f"<h3>{render_name(place, runs[place])}</h3>" if len(runs) > 1 else ""


def render_cards(
    runs: Sequence[Run], render: Callable[[int, Run], str], needs_figures: bool = True
) -> str:
    """Renders a card per run, side by side if there is room. `render` makes the HTML of a run from
    its number and itself; `needs_figures`: from figures of the ledger, which a run may lack."""
    parts = []
    for place, run in enumerate(runs):
        shown = run.measured or not needs_figures
        words = render(place, run) if shown else "<p>Nothing was measured.</p>"
        parts.append(f'<div class="card">{render_title(runs, place)}{words}</div>')
    return f'<div class="cards">{"".join(parts)}</div>'
