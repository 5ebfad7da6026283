"""Seconds that a run stands still, by kind of fault."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from freescale_bench.common.markdown import Results, format_table
from freescale_bench.faults.claims import Row, changes_ranks, is_exact


def format_faults(used: Results, folder: str) -> str:
    rows = [row for result in used.values() for row in result["rows"]]
    about = {name: text for result in used.values() for name, text in result["kinds"].items()}
    lasted: dict[str, list[float]] = {}
    for row in rows:
        for event in row["events"]:
            lasted.setdefault(event["kind"], []).append(event["lasted_s"])
    cells = [
        (
            f"{about[kind]}",
            f"{len(lasted[kind]):,}",
            f"{statistics.median(lasted[kind]):.1f} s",
            f"{max(lasted[kind]):.1f} s",
        )
        for kind in about
        if kind in lasted
    ]
    head = ("what happens", "times", "until the next step, median", "longest")
    faults = sum(row["faults"] for row in rows)
    hosts = sum(row["hosts"] > 1 for row in rows)
    gpus = sum(row.get("device") == "cuda" for row in rows)
    real = sum(row["faults"] for row in rows if row.get("start", "forked") != "forked")
    conditions = (
        f"{faults:,} faults in {len(rows)} runs of 2 to 4 ranks"
        + (f", {gpus} of them on GPUs" if gpus else "")
        + (f", {hosts} of them over two hosts" if hosts else "")
        + f"; {_count_exact(rows)}. Ranks are forked from a process that has imported torch"
        + (f", except after {real} faults" if real else "")
        + ": a start from the command line takes some seconds more, unless it forks, too."
    )
    return format_table(used, folder, head, cells, conditions=conditions)


def format_restarts(used: Results, folder: str) -> str:
    """Formats the seconds of each phase of a restart, by how ranks were started."""
    found: dict[str, list[dict[str, float]]] = {}
    for row in (row for result in used.values() for row in result["rows"]):
        for event in row["events"]:
            if event["phases_s"]:
                how = "forked" if event["forked"] else "new processes"
                found.setdefault(f"{row['start']}, {how}", []).append(event["phases_s"])
    order = sorted(found)
    cells = [
        (
            phase,
            *(f"{statistics.median(each[phase] for each in found[how]):.2f} s" for how in order),
        )
        for phase in next(iter(found.values()))[0]
    ]
    head = ("", *(f"{how} ({len(found[how])} times)" for how in order))
    words = "Medians. Where the launcher or agent ended too, process start has its own."
    return format_table(used, folder, head, cells, conditions=words)


def _count_exact(rows: Sequence[Row]) -> str:
    """Says how many runs equal the undisturbed ones."""
    same = [row for row in rows if not changes_ranks(row)]
    changing = [row for row in rows if changes_ranks(row)]
    words = f"{sum(map(is_exact, same))} of {len(same)} end with the bits of the undisturbed run"
    if changing:
        words += (
            f", and {sum(map(is_exact, changing))} of {len(changing)} whose number of ranks "
            "changes within 1e-12 a step of it (float64)"
        )
    return words
