"""The section about traffic and collisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from freescale.report.glossary import explain
from freescale.report.markup import (
    colour_class,
    format_bytes,
    format_figure,
    render_cards,
    render_table,
)
from freescale.report.runs import Run

_HEAD = ("traffic", "sent a step", "exposed", "carried by")


def render_traffic(runs: Sequence[Run]) -> str:
    return render_cards(runs, _render_run)


def _render_run(place: int, run: Run) -> str:
    ledger = run.ledger

    def show(path: str, form: Callable[[Any], str] = format_bytes) -> str:
        return format_figure(place, path, ledger, form)

    percent = "{:.1f} %".format
    rows = []
    for kind, sent in ledger["bytes_per_step"].items():
        if not sent:
            continue
        paths = ", ".join(
            f"{escape(path)} {show(f'paths/{kind}/{path}')}"
            for path in sorted(ledger.get("paths", {}).get(kind, {}))
        )
        rows.append(
            [
                f'<i class="{colour_class(kind)}"></i>{explain(kind)}',
                show(f"bytes_per_step/{kind}"),
                show(f"exposed_ms/{kind}", "{:.2f} ms".format),
                paths or "not recorded",
            ]
        )
    found = "none recorded (tables replicated, or too few steps)"
    if ledger.get("collision_percent") is not None:
        share = show("collision_percent", percent)
        found = f"<b>{share}</b> of a batch's requests are for rows that the batch before reads too"
    words = f"<p>{explain('Collisions')}: {found}.</p>"
    if ledger.get("cache_miss_percent") is not None:
        words += (
            f"<p>{explain('Cache misses')}: <b>{show('cache_miss_percent', percent)}</b> of the "
            f"rows requested from owners; {show('cache_bytes_up')} a step from their home into "
            f"the caches, {show('cache_bytes_down')} back.</p>"
        )
    if ledger.get("dynamic_rows") is not None:
        rows_there, new, evicted, swept, away, waiting = (
            show(f"dynamic_{name}", "{:,.0f}".format)
            for name in ("rows", "inserted", "evicted", "swept", "turned_away", "waiting")
        )
        fill = ""
        if ledger.get("dynamic_fill_percent") is not None:
            fill = f", {show('dynamic_fill_percent', percent)} of those there is room for"
        words += (
            f"<p>{explain('Dynamic tables')}: <b>{rows_there}</b> rows hold an id{fill}, on "
            f"average over the steps; {new} ids a step get a row, {evicted} rows make room, "
            f"{swept} are removed as old, {away} ids are turned away and {waiting} wait to be "
            "admitted.</p>"
        )
    return words + render_table([explain(name) for name in _HEAD], rows)
