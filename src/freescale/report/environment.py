"""The sections about what the run was: its settings, and the machines it ran on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from freescale.report.glossary import explain
from freescale.report.markup import BARS, format_figure, render_cards, render_table
from freescale.report.runs import Run


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
