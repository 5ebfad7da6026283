"""Tables for the terminal: the metrics of a model, and the ledger of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from freescale.config.metrics import REPEATS, select_headlines


def print_quality(
    console: Console, quality: Mapping[str, Mapping[str, float]], part: str = "test"
) -> None:
    """The metrics of the model that say most, and those of the baselines beside it."""
    model = quality["model"]
    table = Table(title=f"{part} part, full catalogue" if REPEATS in model else f"{part} part")
    if REPEATS in model:
        share = f"{100 * model[REPEATS]:.1f} %"
        table.caption = f"{share} of the targets are repeats"
    table.add_column("metric")
    for name in quality:
        table.add_column(name, justify="right")
    if "popularity" in quality:
        table.add_column("ratio", justify="right")
    for metric in select_headlines(model):
        row = [metric, *(f"{quality[name].get(metric, float('nan')):.4f}" for name in quality)]
        if "popularity" in quality:
            base = quality["popularity"][metric]
            row.append(f"{model[metric] / base:.2f}" if base else "-")
        table.add_row(*row)
    console.print(table)


def print_ledger(console: Console, ledger: Mapping[str, Any]) -> None:
    """Where the time went."""
    if not ledger.get("measured_steps"):
        console.print(
            "ledger: too few steps to measure (the first two are warm-up)",
            highlight=False,
            soft_wrap=True,
        )
        return
    table = Table(
        title=(
            f"where a step's time went (mean of {ledger['measured_steps']} steps, "
            f"{ledger['ranks']} ranks)"
        )
    )
    table.add_column("figure")
    table.add_column("value", justify="right")
    step = ledger["step_ms"]
    table.add_row("step", f"{step['mean']:.1f} ms (median {step['median']:.1f})")
    table.add_row("samples/s", f"{ledger['samples_per_second']:,.0f}")
    table.add_row("tokens/s", f"{ledger['tokens_per_second']:,.0f}")
    table.add_row("straggler", f"{ledger['straggler_percent']:.1f} %")
    table.add_row("exposed communication", f"{ledger['exposed_percent']:.1f} %")
    for kind, value in ledger["exposed_ms"].items():
        if ledger["bytes_per_step"].get(kind):
            paths = ", ".join(sorted(ledger.get("paths", {}).get(kind, {})))
            table.add_row(
                f"  {kind}",
                (f"{value:.2f} ms, {ledger['bytes_per_step'][kind] / 1e6:.2f} MB ({paths})"),
            )
    if any(ledger.get("lane_ms_per_rank") or ()):
        table.add_row(
            "waiting for its own lanes",
            f"{sum(ledger['lane_ms_per_rank']) / ledger['ranks']:.2f} ms",
        )
    for name, value in ledger["spans_ms"].items():
        table.add_row(f"  {name}", f"{value:.2f} ms")
    if ledger.get("collision_percent") is not None:
        table.add_row("collisions", f"{ledger['collision_percent']:.1f} %")
    if ledger.get("sparsity") is not None:
        table.add_row("sparsity (padded share)", f"{100 * ledger['sparsity']:.1f} %")
    table.add_row("imbalance of compute", f"{ledger['imbalance']:.3f}")
    if ledger.get("cost_error_percent") is not None:
        table.add_row("error of the cost model", f"{ledger['cost_error_percent']:.1f} %")
    for rank, peak in enumerate(ledger.get("peak_memory_bytes_per_rank", [])):
        table.add_row(
            f"peak memory, rank {rank}",
            "  ".join(f"{where} {size / 2**20:,.0f} MiB" for where, size in peak.items()),
        )
    console.print(table)
