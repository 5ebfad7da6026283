"""The section about the balance of the ranks: the work of a step before and after balancing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freescale.report.charts import draw_dots, render_panel, render_panels, thin
from freescale.report.glossary import explain
from freescale.report.markup import BARS, format_figure, render_cards, render_table
from freescale.report.runs import Run

_STEPS = 150  # with dots
_RANKS = 16
_UNITS = {"tokens": "history events", "cost": "predicted cost"}


# By step: its number, and the share of each rank, where 1 is the mean over ranks.
Shares = list[tuple[int, list[float]]]


def render_balance(runs: Sequence[Run]) -> str:
    return render_cards(runs, _render_run)


def _render_run(place: int, run: Run) -> str:
    if run.ledger["ranks"] < 2:
        return "<p>One rank: nothing to balance.</p>"
    steps = [figures for figures in run.measured_lines if figures.get("before")]
    if not steps:
        words = "Not recorded: the run counted no events, or was made by an older version."
        return f"<p>{words} {_describe_imbalance(place, run)}</p>"
    balanced = any(figures.get("after") for figures in steps)
    panels = []
    for name, words in _UNITS.items():
        before = _compute_shares(steps, name, "before")
        after = _compute_shares(steps, name, "after")
        limits = _find_limits(before + after)  # one scale for both
        for when, shares in (("before", before), ("after", after)):
            title = f"{words}, {when + ' balancing' if balanced else 'not balanced'}"
            panels += _draw_shares(shares, limits, title, f"d-{when}")
    measured = _compute_shares(steps, "compute_ms")
    title = "Measured forward and backward"
    panels += _draw_shares(measured, _find_limits(measured), title, "r-2")
    scale = "A dot is a rank in a step; 1 is the mean over ranks"
    note = f"<p>{scale}; all wait for the highest dot of a step.</p>"
    words = _describe_imbalance(place, run)
    return f"<p>{words}</p>{render_panels(panels)}{note}{_render_ranks(run, steps, balanced)}"


def _describe_imbalance(place: int, run: Run) -> str:
    def show(name: str, form: str = "{:.3f}") -> str:
        return format_figure(place, name, run.ledger, form.format)

    measured = explain("Imbalance of measured compute", "imbalance")
    words = f"{measured} (slowest rank / mean): <b>{show('imbalance')}</b>."
    if run.ledger.get("predicted_imbalance") is None:
        return f"{words} The samples stayed where they were: nothing was balanced."
    before = parts = ""
    if run.ledger.get("split_samples"):
        split, count = show("split_samples", "{:.3g}"), show("split_parts", "{:.3g}")
        parts = f"In such a step {split} histories were divided into {count} parts. "
    if run.ledger.get("predicted_imbalance_before") is not None:
        before = f"<b>{show('predicted_imbalance_before')}</b> before, "
    return (
        f"{explain('Predicted imbalance')} {before}<b>{show('predicted_imbalance')}</b> "
        "after balancing; "
        f"{show('moved_tokens_percent', '{:.0f} %')} of the tokens changed ranks. {parts}{words}"
    )


def _compute_shares(steps: Sequence[Mapping[str, Any]], name: str, when: str = "") -> Shares:
    """Each rank's share of a step's figure, in some of the steps. `when`: before or after
    balancing, for figures that have both."""
    found: Shares = []
    for figures in thin(steps, _STEPS):
        values = figures.get(when, {}).get(name) if when else figures.get(name)
        if values and sum(values):
            shares = [value * len(values) / sum(values) for value in values]
            found.append((figures["step"], _choose_shares(shares)))
    return found


def _choose_shares(shares: list[float]) -> list[float]:
    """Chooses some of many ranks, including the most and the least loaded."""
    if len(shares) <= _RANKS:
        return shares
    ordered = sorted(shares)
    return [ordered[place * (len(ordered) - 1) // (_RANKS - 1)] for place in range(_RANKS)]


def _find_limits(shares: Shares) -> tuple[float, float]:
    values = [value for _, of_step in shares for value in of_step]
    return min([0.9, *values]), max([1.1, *values])


def _draw_shares(shares: Shares, limits: tuple[float, float], title: str, style: str) -> list[str]:
    """A panel, or none without shares."""
    if not shares:
        return []
    steps, values = [step for step, _ in shares], [of_step for _, of_step in shares]
    chart = draw_dots(steps, values, limits, "share of the mean", title, style)
    return [render_panel(title[0].upper() + title[1:], chart)]


def _render_ranks(run: Run, steps: Sequence[Mapping[str, Any]], balanced: bool) -> str:
    """Mean and largest of the steps, rank by rank."""
    whens = ("before", "after") if balanced else ("before",)
    rows = []
    for rank in range(min(run.ledger["ranks"], BARS)):
        row = [f"rank {rank}"]
        for name in ("tokens", "longest"):
            for when in whens:
                of_steps = [figures.get(when, {}).get(name, []) for figures in steps]
                values = [of_ranks[rank] for of_ranks in of_steps if len(of_ranks) > rank]
                mean = sum(values) / max(1, len(values))
                most = f" <small>(max {max(values):,.0f})</small>" if values else ""
                row.append(f"{mean:,.0f}{most}" if values else "-")
        rows.append(row)
    suffixes = [f" {when}" if balanced else "" for when in whens]
    names = ("events a step", "longest history")
    head = ["", *(f"{name}{suffix}" for name in names for suffix in suffixes)]
    return f"<details><summary>Rank by rank</summary>{render_table(head, rows)}</details>"
