"""The parts of the report that are drawn over the steps: balance, loss, metrics, times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape

from freescale.report.charts import Series, dots, lines, thinned
from freescale.report.runs import Run
from freescale.report.sections import BARS, cards, figure, table

_STEPS = 150  # with dots
_RANKS = 16
_UNITS = {"tokens": "history events", "cost": "predicted cost"}
WARM_UP = 2


def _panel(title: str, picture: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{picture}</figure>"


def _pictures(panels: Sequence[str]) -> str:
    return f'<div class="panels">{"".join(panels)}</div>'


# ---- balance


def balance(runs: Sequence[Run]) -> str:
    return cards(runs, _balance)


def _balance(place: int, run: Run) -> str:
    """What each rank had of a batch, as a share of the ranks' mean, before and after."""
    steps = [figures for figures in run.steps[WARM_UP:] if figures.get("before")]
    if run.ledger["ranks"] < 2:
        return "<p>One rank: nothing to balance.</p>"
    if not steps:
        return (
            "<p>Not recorded: the run was made by an older version. "
            + _imbalance(place, run)
            + "</p>"
        )
    balanced = any(figures.get("after") for figures in steps)
    panels = []
    for name, words in _UNITS.items():
        shares = {when: _shares(steps, when, name) for when in ("before", "after")}
        values = [
            value for _, of_step in [*shares["before"], *shares["after"]] for value in of_step
        ]
        if not values:
            continue
        reach = (min(0.9, *values), max(1.1, *values))  # one scale for both
        for when, found in shares.items():
            if found:
                title = f"{words}, {when + ' balancing' if balanced else 'not balanced'}"
                picture = dots(
                    [s for s, _ in found],
                    [v for _, v in found],
                    reach,
                    "share of the mean",
                    title,
                    f"d-{when}",
                )
                panels.append(_panel(title.capitalize(), picture))
    measured = _shares(steps, "", "compute_ms")
    if measured:
        values = [value for _, of_step in measured for value in of_step]
        reach = (min(0.9, *values), max(1.1, *values))
        title = "Measured forward and backward"
        panels.append(
            _panel(
                title,
                dots(
                    [s for s, _ in measured],
                    [v for _, v in measured],
                    reach,
                    "share of the mean",
                    title,
                    "r-2",
                ),
            )
        )
    note = (
        "<p>A dot is a rank in a step; 1 is the mean over ranks; all wait for the highest dot "
        "of a step.</p>"
    )
    return f"<p>{_imbalance(place, run)}</p>{_pictures(panels)}{note}{_ranks(run, steps, balanced)}"


def _imbalance(place: int, run: Run) -> str:
    show: Callable[[float], str] = lambda value: f"{value:.3f}"  # noqa: E731
    words = (
        "Imbalance of measured compute (slowest rank / mean): "
        f"<b>{figure(place, 'imbalance', run.ledger, show)}</b>."
    )
    if run.ledger.get("predicted_imbalance") is None:
        return f"{words} The samples stayed where they were: nothing was balanced."
    before = figure(place, "predicted_imbalance_before", run.ledger, show)
    before = (
        f"<b>{before}</b> before, "
        if run.ledger.get("predicted_imbalance_before") is not None
        else ""
    )
    after = figure(place, "predicted_imbalance", run.ledger, show)
    moved = figure(place, "moved_tokens_percent", run.ledger, lambda value: f"{value:.0f} %")
    return (
        f"Predicted imbalance {before}<b>{after}</b> after balancing; {moved} of the tokens "
        f"changed ranks. {words}"
    )


def _shares(steps: Sequence[dict], when: str, name: str) -> list[tuple[int, list[float]]]:
    found = []
    for figures in thinned(steps, _STEPS):
        values = figures.get(when, {}).get(name) if when else figures.get(name)
        if values and sum(values):
            found.append(
                (figures["step"], _some([value * len(values) / sum(values) for value in values]))
            )
    # a resumed run may have had other numbers of ranks
    ranks = min((len(values) for _, values in found), default=0)
    return [(step, values[:ranks]) for step, values in found]


def _some(values: list[float]) -> list[float]:
    """Of many ranks some, the most and the least loaded among them."""
    if len(values) <= _RANKS:
        return values
    ordered = sorted(values)
    return [ordered[place * (len(ordered) - 1) // (_RANKS - 1)] for place in range(_RANKS)]


def _ranks(run: Run, steps: Sequence[dict], balanced: bool) -> str:
    """Mean and largest of the steps, rank by rank."""
    rows = []
    for rank in range(min(run.ledger["ranks"], BARS)):
        row = [f"rank {rank}"]
        for name in ("tokens", "longest"):
            for when in ("before", "after") if balanced else ("before",):
                values = [
                    f[when][name][rank] for f in steps if len(f.get(when, {}).get(name, [])) > rank
                ]
                row.append(
                    f"{sum(values) / len(values):,.0f} <small>(max {max(values):,.0f})</small>"
                    if values
                    else "-"
                )
        rows.append(row)
    whens = (" before", " after") if balanced else ("",)
    head = [
        "",
        *(f"{name}{when}" for name in ("events a step", "longest history") for when in whens),
    ]
    return f"<details><summary>Rank by rank</summary>{table(head, rows)}</details>"


# ---- over the steps


def curves(runs: Sequence[Run]) -> str:
    """One picture a figure, a line a run."""
    panels: list[str] = []

    def add(
        title: str,
        y_label: str,
        points: Callable[[Run], list[tuple[float, float]]],
        zero: bool = True,
    ) -> None:
        series = [Series(run.name, f"r-{place % 8}", points(run)) for place, run in enumerate(runs)]
        series = [one for one in series if one.points]
        if series:
            panels.append(_panel(title, lines(series, y_label, zero=zero)))

    add("Loss", "loss", lambda run: _metric(run, "loss"), zero=False)
    names = dict.fromkeys(
        name
        for run in runs
        for e in run.metrics
        for name in e.get("validation", {}).get("model", {})
    )
    for name in names:
        add(f"Validation {name}", name, partial(_validation, name), zero=False)
    add("Step", "ms", lambda run: _figure(run, "step_ms"))
    add("Straggler", "% of the step", lambda run: _figure(run, "straggler_percent"))
    add("Exposed communication", "% of the step", _exposed)
    add("Collisions", "% of requests", lambda run: _figure(run, "collision_percent"))
    if not panels:
        return "<p>Nothing was recorded over the steps.</p>"
    legend = "".join(
        f'<li><i class="run r-{place % 8}"></i>{escape(run.name)}</li>'
        for place, run in enumerate(runs)
    )
    return (
        (f'<ul class="legend">{legend}</ul>' if len(runs) > 1 else "")
        + _pictures(panels)
        + _tests(runs)
    )


def _metric(run: Run, name: str) -> list[tuple[float, float]]:
    return [(entry["step"], entry[name]) for entry in run.metrics if entry.get(name) is not None]


def _validation(name: str, run: Run) -> list[tuple[float, float]]:
    found = [
        (entry["step"], entry["validation"]["model"].get(name))
        for entry in run.metrics
        if "validation" in entry
    ]
    return [(step, value) for step, value in found if value is not None]


def _figure(run: Run, name: str) -> list[tuple[float, float]]:
    return [
        (figures["step"], figures[name])
        for figures in run.steps[WARM_UP:]
        if figures.get(name) is not None
    ]


def _exposed(run: Run) -> list[tuple[float, float]]:
    return [
        (f["step"], 100 * sum(f["exposed_ms"].values()) / f["step_ms"])
        for f in run.steps[WARM_UP:]
        if f["step_ms"]
    ]


def _tests(runs: Sequence[Run]) -> str:
    """The test part's metrics, model and baselines."""
    columns: list[tuple[str, dict]] = []
    for run in runs:
        test: dict[str, dict] = next(
            (entry["test"] for entry in reversed(run.metrics) if "test" in entry), {}
        )
        columns += [
            (f"{run.name}: {who}" if len(runs) > 1 else who, values) for who, values in test.items()
        ]
    names = dict.fromkeys(name for _, values in columns for name in values)
    if not names:
        return ""
    rows = [
        [escape(n), *("-" if v.get(n) is None else f"{v[n]:.4f}" for _, v in columns)]
        for n in names
    ]
    return "<h3>Test part</h3>" + table(["metric", *(escape(title) for title, _ in columns)], rows)
