"""Prints the results of `freescale simulate`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from freescale.config import RunConfig, SimulateConfig
from freescale.report.console import print_ledger
from freescale.simulate.network import list_presets, load_preset
from freescale.simulate.plan import GPUS, PRESETS, describe_plans, plan_recipe
from freescale.simulate.run import Outcome, run_simulation
from freescale.simulate.verdict import BASE, GIVEN

_WIDE = 120  # columns of a table, if the output is not a terminal


def print_simulation(config: SimulateConfig, gpus: Sequence[int]) -> None:
    """Simulates and prints tables, or lists the networks."""
    console = _make_console()
    if config.preset == "list":
        for name in list_presets():
            console.print(f"{name:14s} {load_preset(name).about}", highlight=False)
        return
    outcomes: list[Outcome] = []
    data = run_simulation(config, gpus, outcomes.append)
    if data["own"]:
        _print_own(console, data["own"])
    elif config.run:
        console.print("the run's own ranks are not known: nothing to compare with", style="yellow")
    for count in gpus:
        console.print(_make_technique_table([one for one in outcomes if one.gpus == count]))
        changes = [row for row in data["changes"] if row["gpus"] == count]
        if changes:
            console.print(_make_change_table(changes))
    if len(gpus) > 1:
        console.print(_make_gpu_table(outcomes))
    for one in outcomes:
        if one.label == GIVEN:
            print_ledger(console, one.figures)
    for note in data["notes"]:
        _print_note(console, note)
    if config.out:
        _print_note(console, f"ledgers and traces: {config.out}")
    console.print()
    for verdict in data["verdicts"]:
        console.print(verdict, highlight=False, soft_wrap=True, style="bold")


def print_plans(config: SimulateConfig, gpus: Sequence[int], presets: Sequence[str] | None) -> None:
    """Predicts the training of a recipe and prints a table. None: H100s and H200s."""
    console = _make_console()
    plans = plan_recipe(config, gpus or GPUS, presets or PRESETS)
    columns = [
        *("batch", "tables GB", "memory GB", "micro-batches", "samples/s", "TFLOP/s"),
        *("step ms", "exposed %", "hours"),
    ]
    title = f"{config.recipe}, predicted; batch, GB and TFLOP/s are those of a GPU"
    table = _make_table(title, "GPUs", columns)
    for plan in plans:
        cells = [f"{plan.batch:,}", f"{plan.tables_gb:.1f}"]
        if plan.fits:
            values = (plan.tflops, plan.step_ms, plan.exposed_percent)
            cells += [f"{plan.memory_gb:.0f}", f"{plan.micro_batches}"]
            cells += [f"{plan.samples_per_second:,.0f}", *(f"{value:,.1f}" for value in values)]
            cells += [f"{plan.hours:.2f}"]
        else:
            cells += [f"> {plan.room_gb:.0f}", "does not fit"]
        table.add_row(f"{plan.gpus} x {plan.gpu}", *cells)
    console.print(table)
    recipe = RunConfig.from_settings({"data": "-", "recipe": config.recipe})
    for note in describe_plans(recipe):
        _print_note(console, note)
    if config.out:
        folder = Path(config.out)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps([asdict(plan) for plan in plans], indent=1)
        (folder / "plan.json").write_text(text + "\n", encoding="utf-8")


def _make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDE)


def _print_note(console: Console, note: str) -> None:
    """Notes in capitals are warnings."""
    warns = note.split(":")[0].isupper()
    console.print(note, highlight=False, soft_wrap=True, style="yellow" if warns else None)


def _make_table(title: str, first: str, columns: Iterable[str]) -> Table:
    """A table with words in the first column and figures in the others."""
    table = Table(title=title)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _print_own(console: Console, own: Mapping[str, Any]) -> None:
    """The run on its own ranks, simulated and measured."""
    title = f"the run itself on its {own['ranks']:,} ranks, a step"
    table = _make_table(title, "figure", ("simulated", "measured"))
    for row in own["rows"]:
        if row["simulated"] or row["measured"]:
            shown = [row["simulated"], row["measured"]]
            table.add_row(row["figure"], *("" if v is None else f"{v:,.1f}" for v in shown))
    console.print(table)
    for note in own["notes"]:
        _print_note(console, note)
    console.print()


def _make_technique_table(outcomes: Sequence[Outcome]) -> Table:
    title = f"what each technique would give on {outcomes[0].gpus:,} GPUs"
    columns = ("step ms", "straggler %", "exposed %", "exposed ms", "samples/s", "x TorchRec")
    table = _make_table(title, "technique", columns)
    base = next(one for one in outcomes if one.label == BASE).figures["samples_per_second"]
    for one in outcomes:
        figures, rate = one.figures, one.figures["samples_per_second"]
        shares = (figures["straggler_percent"], figures["exposed_percent"])
        values = (figures["step_ms"]["mean"], *shares, one.exposed_ms)
        shown = [f"{value:,.2f}" for value in values]
        table.add_row(one.label, *shown, f"{rate:,.0f}", f"{rate / base:.2f}")
    return table


def _make_change_table(changes: Sequence[dict[str, Any]]) -> Table:
    """The largest gain shows the bottleneck."""
    arms = list(dict.fromkeys(row["arm"] for row in changes))
    title = "what a better machine or a larger batch would give, more samples/s"
    table = _make_table(title, "change", [f"with {arm}" for arm in arms])
    for what in dict.fromkeys(row["change"] for row in changes):
        rows = [row for row in changes if row["change"] == what]
        gains = {row["arm"]: row["more_samples_per_second_percent"] for row in rows}
        table.add_row(what, *(f"{gains[arm]:+.2f} %" if arm in gains else "" for arm in arms))
    return table


def _make_gpu_table(outcomes: Sequence[Outcome]) -> Table:
    counts = list(dict.fromkeys(one.gpus for one in outcomes))
    title = "straggler % / exposed % by GPUs"
    table = _make_table(title, "technique", [f"{count:,}" for count in counts])
    for label in dict.fromkeys(one.label for one in outcomes):
        shown = {}
        for one in (one for one in outcomes if one.label == label):
            shares = (one.figures[f"{kind}_percent"] for kind in ("straggler", "exposed"))
            shown[one.gpus] = " / ".join(f"{share:.1f}" for share in shares)
        table.add_row(label, *(shown.get(count, "") for count in counts))
    return table
