"""The section about traffic and collisions."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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
    rows = []
    for kind, sent in ledger["bytes_per_step"].items():
        if not sent:
            continue
        paths = ", ".join(
            f"{escape(path)} {format_figure(place, f'paths/{kind}/{path}', ledger, format_bytes)}"
            for path in sorted(ledger.get("paths", {}).get(kind, {}))
        )
        rows.append(
            [
                f'<i class="{colour_class(kind)}"></i>{explain(kind)}',
                format_figure(place, f"bytes_per_step/{kind}", ledger, format_bytes),
                format_figure(place, f"exposed_ms/{kind}", ledger, "{:.2f} ms".format),
                paths or "not recorded",
            ]
        )
    found = "none recorded (tables replicated, or too few steps)"
    if ledger.get("collision_percent") is not None:
        share = format_figure(place, "collision_percent", ledger, "{:.1f} %".format)
        found = f"<b>{share}</b> of a batch's requests are for rows that the batch before reads too"
    words = f"<p>{explain('Collisions')}: {found}.</p>"
    if ledger.get("cache_miss_percent") is not None:
        share = format_figure(place, "cache_miss_percent", ledger, "{:.1f} %".format)
        up = format_figure(place, "cache_bytes_up", ledger, format_bytes)
        down = format_figure(place, "cache_bytes_down", ledger, format_bytes)
        words += (
            f"<p>{explain('Cache misses')}: <b>{share}</b> of the rows requested from owners; "
            f"{up} a step from their home into the caches, {down} back.</p>"
        )
    if ledger.get("dynamic_rows") is not None:
        rows_there, *changes = (
            format_figure(place, f"dynamic_{name}", ledger, "{:,.0f}".format)
            for name in ("rows", "inserted", "evicted", "swept", "turned_away", "waiting")
        )
        new, evicted, swept, away, waiting = changes
        fill = ""
        if ledger.get("dynamic_fill_percent") is not None:
            share = format_figure(place, "dynamic_fill_percent", ledger, "{:.1f} %".format)
            fill = f", {share} of those there is room for"
        words += (
            f"<p>{explain('Dynamic tables')}: <b>{rows_there}</b> rows hold an id{fill}, on "
            f"average over the steps; {new} ids a step get a row, {evicted} rows make room, "
            f"{swept} are removed as old, {away} ids are turned away and {waiting} wait to be "
            "admitted.</p>"
        )
    return words + render_table([explain(name) for name in _HEAD], rows)
