"""Prints the results of `freescale simulate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from freescale.config import SimulateConfig
from freescale.report.console import print_ledger
from freescale.simulate.calibrate import calibrate
from freescale.simulate.network import list_presets, load_preset
from freescale.simulate.recovery import PARTS
from freescale.simulate.run import Outcome, run_simulation
from freescale.simulate.verdict import ASKED, BASE

_WIDE = 120  # of a table that goes to no terminal


def print_simulation(config: SimulateConfig, gpus: Sequence[int]) -> None:
    """Simulates and prints tables, or lists the networks."""
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDE)
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
    if data["useful"]:
        console.print(_make_useful_table(data["useful"], config.failure_every or 0.0))
    for one in outcomes:
        if one.label == ASKED:
            print_ledger(console, one.figures)
    for note in data["notes"]:
        _print_note(console, note)
    if config.out:
        _print_note(console, f"ledgers and traces: {config.out}")
    console.print()
    for verdict in data["verdicts"]:
        console.print(verdict, highlight=False, soft_wrap=True, style="bold")


def _print_note(console: Console, note: str) -> None:
    """Notes in capitals are warnings."""
    warns = note.split(":")[0].isupper()
    console.print(note, highlight=False, soft_wrap=True, style="yellow" if warns else None)


def _print_own(console: Console, own: Mapping[str, Any]) -> None:
    """The run on its own ranks, simulated beside measured."""
    table = Table(title=f"the run itself on its {own['ranks']:,} ranks, a step")
    table.add_column("figure")
    for column in ("simulated", "measured"):
        table.add_column(column, justify="right")
    for row in own["rows"]:
        if row["simulated"] or row["measured"]:
            shown = [row["simulated"], row["measured"]]
            table.add_row(row["figure"], *("" if v is None else f"{v:,.1f}" for v in shown))
    console.print(table)
    for note in own["notes"]:
        _print_note(console, note)
    console.print()


def _make_technique_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title=f"what each technique would give on {outcomes[0].gpus:,} GPUs")
    for column in (
        "technique",
        "step ms",
        "straggler %",
        "exposed %",
        "exposed ms",
        "samples/s",
        "x TorchRec",
    ):
        table.add_column(column, justify="left" if column == "technique" else "right")
    base = next(one for one in outcomes if one.label == BASE)
    for one in outcomes:
        faster = one.figures["samples_per_second"] / base.figures["samples_per_second"]
        values = (
            one.figures["step_ms"]["mean"],
            one.figures["straggler_percent"],
            one.figures["exposed_percent"],
            one.exposed_ms,
        )
        shown = [f"{value:,.2f}" for value in values] + [
            f"{one.figures['samples_per_second']:,.0f}",
            f"{faster:.2f}",
        ]
        table.add_row(one.label, *shown)
    return table


def _make_change_table(changes: Sequence[dict[str, Any]]) -> Table:
    """What helps most is the bottleneck."""
    arms = list(dict.fromkeys(row["arm"] for row in changes))
    table = Table(title="what a better machine or a larger batch would give, more samples/s")
    table.add_column("change")
    for arm in arms:
        table.add_column(f"with {arm}", justify="right")
    for what in dict.fromkeys(row["change"] for row in changes):
        gains = {
            row["arm"]: row["more_samples_per_second_percent"]
            for row in changes
            if row["change"] == what
        }
        table.add_row(what, *(f"{gains[arm]:+.2f} %" if arm in gains else "" for arm in arms))
    return table


def _make_useful_table(rows: Sequence[Mapping[str, Any]], failure_every: float) -> Table:
    """What each failure costs, and what is left."""
    table = Table(
        title=f"useful time with {rows[0]['arm']} at a failure every {failure_every:,.0f} s, and "
        "the seconds that each costs"
    )
    table.add_column("GPUs", justify="right")
    table.add_column("restored from")
    for column in (*PARTS, "together", "useful"):
        table.add_column(column, justify="right")
    for row in rows:
        seconds = row["seconds"]
        cells = [f"{value:,.2f}" for value in (*seconds.values(), sum(seconds.values()))]
        table.add_row(f"{row['gpus']:,}", row["from"], *cells, f"{100 * row['useful']:.1f} %")
    return table


def _make_gpu_table(outcomes: Sequence[Outcome]) -> Table:
    counts = list(dict.fromkeys(one.gpus for one in outcomes))
    table = Table(title="straggler % / exposed % by GPUs")
    table.add_column("technique")
    for count in counts:
        table.add_column(f"{count:,}", justify="right")
    for label in dict.fromkeys(one.label for one in outcomes):
        found = {one.gpus: one.figures for one in outcomes if one.label == label}
        cells = [
            f"{found[c]['straggler_percent']:.1f} / {found[c]['exposed_percent']:.1f}"
            if c in found
            else ""
            for c in counts
        ]
        table.add_row(label, *cells)
    return table


def write_calibration(device: str, out: Path, shapes: Sequence[str], repetitions: int) -> None:
    """Measures this machine and writes the calibration to `out`."""
    pairs = [_parse_shape(text) for text in shapes]
    data = calibrate(
        device,
        out.stem,
        shapes=pairs,
        repetitions=repetitions,
        report=lambda line: print(line, flush=True),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for shape in data["shapes"]:
        errors = [
            f"{way} {shape[f'{way}_error_percent']['median']:.1f} %"
            for way in ("forward", "backward")
        ]
        print(
            f"width {shape['width']}, {shape['heads']} heads: the curve is off by "
            f"{', '.join(errors)} (medians)"
        )
    print(out)


def _parse_shape(text: str) -> tuple[int, int]:
    width, colon, heads = text.partition(":")
    if not (colon and width.isdigit() and heads.isdigit() and int(heads)):
        raise ValueError(f"--shape {text!r} is not WIDTH:HEADS, like 512:4")
    return int(width), int(heads)
