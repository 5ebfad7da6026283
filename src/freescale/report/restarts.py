"""The section about how often a run ended before its time, and went on. Runs that did not have
none."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from freescale.report.markup import render_name, render_table
from freescale.report.runs import Run

_HEAD = ["ended (UTC)", "at step", "why", "until it went on", "from step", "steps made again"]


def render_restarts(runs: Sequence[Run]) -> str:
    """A table for each run that was started again; empty if none was."""
    parts = []
    for place, run in enumerate(runs):
        found = [entry for entry in run.metrics if isinstance(entry.get("restart"), dict)]
        if found:
            title = f"<h3>{render_name(place, run)}</h3>" if len(runs) > 1 else ""
            parts.append(title + render_table(_HEAD, [_list_cells(e) for e in found], "words"))
    return "".join(parts)


def _list_cells(entry: dict[str, Any]) -> list[str]:
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
