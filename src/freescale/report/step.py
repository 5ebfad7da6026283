"""The sections about where a step's time goes, a bar per rank, and about traffic and collisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from freescale.report.charts import choose_ticks, format_tick
from freescale.report.glossary import explain
from freescale.report.markup import (
    BARS,
    colour_class,
    format_bytes,
    format_figure,
    format_place,
    render_cards,
    render_table,
)
from freescale.report.runs import Run
from freescale.report.timeline import choose_ranks

# The order of a bar: first the model's work, then the rest.
_ORDER = (
    *("forward", "backward", "optimizer", "lookup", "update rows", "deduplicate"),
    *("data", "agree", "balance", "arrive"),
)
_COMPUTE = "forward and backward"  # older versions recorded only this
_WORDS = {
    "straggler": "waiting for the slowest rank",
    "exposed": "exposed communication",
    "lanes": "waiting for the rank's own lanes",
}

# By part of a bar: its place in the ledger, and the milliseconds of every rank.
Parts = dict[str, tuple[str, list[float]]]


def render_step_time(runs: Sequence[Run]) -> str:
    lengths = [
        sum(values[rank] for _, values in _list_parts(run.ledger).values())
        for run in runs
        if run.measured
        for rank in range(run.ledger["ranks"])
    ]
    longest = max(lengths, default=0.0)  # one scale for all runs
    return render_cards(runs, lambda place, run: _render_bars(place, run, longest))


def _list_parts(ledger: Mapping[str, Any]) -> Parts:
    """The parts of a bar in their order: a rank's work, then its waits."""
    parts: Parts = {}
    busy = ledger.get("busy_ms_per_rank") or {}

    def place(name: str) -> tuple[bool, int]:
        return name == "other", _ORDER.index(name) if name in _ORDER else len(_ORDER)

    for name in sorted(busy, key=place):
        parts[name] = (f"busy_ms_per_rank/{name}", busy[name])
    if not busy:
        parts[_COMPUTE] = ("compute_ms_per_rank", ledger["compute_ms_per_rank"])
    parts["straggler"] = ("straggler_ms_per_rank", ledger["straggler_ms_per_rank"])
    if ledger.get("exposed_ms_per_rank"):
        parts["exposed"] = ("exposed_ms_per_rank", ledger["exposed_ms_per_rank"])
    if any(ledger.get("lane_ms_per_rank") or ()):
        parts["lanes"] = ("lane_ms_per_rank", ledger["lane_ms_per_rank"])
    return parts


def _colour(name: str) -> str:
    return colour_class("forward" if name == _COMPUTE else name)


def _render_bars(place: int, run: Run, longest: float) -> str:
    parts = _list_parts(run.ledger)
    compute = run.ledger["compute_ms_per_rank"]
    ranks = choose_ranks(range(run.ledger["ranks"]), BARS, compute.index(max(compute)))
    marks = choose_ticks(0, longest)
    scale = 100 / marks[-1]
    rows = []
    for rank in ranks:
        pieces = []
        for name, (path, values) in parts.items():
            words = escape(f"{_WORDS.get(name, name)}: {values[rank]:.2f} ms", quote=True)
            pieces.append(
                f'<span class="{_colour(name)}" style="width:{values[rank] * scale:.3f}%" '
                f'title="{words}" {format_place(place, f"{path}/{rank}", values[rank])}></span>'
            )
        rows.append(f'<div class="bar"><b>rank {rank}</b><div>{"".join(pieces)}</div></div>')
    axis = "".join(
        f'<span style="left:{mark * scale:.2f}%">{format_tick(mark)}</span>' for mark in marks
    )
    left_out = ""
    if len(ranks) < len(compute):
        left_out = f"<p>{len(ranks)} of {run.ledger['ranks']} ranks, the slowest among them.</p>"
    legend = "".join(
        f'<li><i class="{_colour(name)}"></i>{explain(_WORDS.get(name, name))}'
        f" <b>{sum(values) / len(values):,.2f} ms</b></li>"
        for name, (_, values) in parts.items()
    )
    return (
        f'<div class="bars">{"".join(rows)}<div class="bar ruler"><b></b><div>{axis}</div></div>'
        f'<p class="unit">ms a step, mean of {run.ledger["measured_steps"]:,} measured steps; '
        "below, the mean over ranks</p></div>"
        f'<ul class="legend">{legend}</ul>{left_out}'
    )


_TRAFFIC_HEAD = ("traffic", "sent a step", "exposed", "carried by")


def render_traffic(runs: Sequence[Run]) -> str:
    return render_cards(runs, _render_traffic_of_run)


def _render_traffic_of_run(place: int, run: Run) -> str:
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
    return words + render_table([explain(name) for name in _TRAFFIC_HEAD], rows)
