"""Tables for the terminal: the metrics of a model, and the ledger of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isnan
from typing import Any

from rich.console import Console
from rich.table import Table

from freescale.config.metrics import COLD, COLD_TARGETS, REPEATS, select_headlines


def print_quality(
    console: Console, quality: Mapping[str, Mapping[str, float]], part: str = "test"
) -> None:
    """Prints the headline metrics of the model and of the baselines."""
    model = quality["model"]
    table = Table(title=f"{part} part, full catalogue" if REPEATS in model else f"{part} part")
    if REPEATS in model:
        table.caption = f"{100 * model[REPEATS]:.1f} % of the targets are repeats"
        if model.get(COLD_TARGETS):
            rate = f"HR@10 of these {model[f'hr@10{COLD}']:.4f}"
            table.caption += f", {100 * model[COLD_TARGETS]:.1f} % cold items ({rate})"
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
    if undefined := [name for name in model if _lacks_classes(name, model)]:
        reason = "not defined, since no user has candidates of both classes"
        console.print(f"{', '.join(undefined)}: {reason}", highlight=False, soft_wrap=True)


def _lacks_classes(name: str, model: Mapping[str, float]) -> bool:
    """Whether a GAUC is undefined, as with leave-one-out, although the AUC over all is not."""
    whole = model.get(name.removeprefix("g"), float("nan"))
    return name.startswith("gauc/") and isnan(model[name]) and not isnan(whole)


def print_ledger(console: Console, ledger: Mapping[str, Any]) -> None:
    """Prints where the time went."""
    if not ledger.get("measured_steps"):
        words = "ledger: too few steps to measure (the first two are warm-up)"
        console.print(words, highlight=False, soft_wrap=True)
        return
    ranks = f"{ledger['ranks']} rank{'s' * (ledger['ranks'] > 1)}"
    table = Table(
        title=f"where a step's time went (mean of {ledger['measured_steps']:,} steps on {ranks})"
    )
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in _list_figures(ledger):
        table.add_row(name, value)
    console.print(table)


# The most important spans; the report has all of them.
_SPANS = ("forward", "backward", "optimizer")


def _list_figures(ledger: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    step = ledger["step_ms"]
    yield "step time", f"{step['mean']:.1f} ms (median {step['median']:.1f})"
    yield "samples/s", f"{ledger['samples_per_second']:,.0f}"
    yield "tokens/s", f"{ledger['tokens_per_second']:,.0f}"
    for name in _SPANS:
        if name in ledger["spans_ms"]:
            yield name, f"{ledger['spans_ms'][name]:.2f} ms"
    if any(ledger.get("lane_ms_per_rank") or ()):
        mean = sum(ledger["lane_ms_per_rank"]) / ledger["ranks"]
        yield "waiting for its own lanes", f"{mean:.2f} ms"
    if ledger["ranks"] > 1:
        yield "straggler time", f"{ledger['straggler_percent']:.1f} % of the step"
        yield "exposed communication", f"{ledger['exposed_percent']:.1f} % of the step"
    for kind, value in ledger["exposed_ms"].items():
        if sent := ledger["bytes_per_step"].get(kind):
            paths = ", ".join(sorted(ledger.get("paths", {}).get(kind, {})))
            yield f"  {kind}", f"{value:.2f} ms, {sent / 1e6:.2f} MB ({paths})"
    if ledger.get("collision_percent") is not None:
        yield "collisions", f"{ledger['collision_percent']:.1f} % of requests"
    if ledger.get("cache_miss_percent") is not None:
        up, down = (ledger[f"cache_bytes_{way}"] / 1e6 for way in ("up", "down"))
        share = ledger["cache_miss_percent"]
        yield "cache misses", f"{share:.1f} %, {up:.2f} MB up, {down:.2f} down"
    if ledger.get("dynamic_rows") is not None:
        names = ("inserted", "evicted", "turned_away")
        new, gone, away = (ledger[f"dynamic_{name}"] for name in names)
        share = ledger.get("dynamic_fill_percent")
        fill = "" if share is None else f" ({share:.1f} % full)"
        yield (
            "dynamic rows",
            f"{ledger['dynamic_rows']:,.0f}{fill}; {new:,.0f} new a step, {gone:,.0f} evicted, "
            f"{away:,.0f} turned away",
        )
    if ledger.get("sparsity") is not None:
        yield "padding avoided", f"{100 * ledger['sparsity']:.1f} % of a padded batch"
    if ledger["ranks"] > 1:
        yield "imbalance of compute", f"{ledger['imbalance']:.3f}"
    if ledger.get("cost_error_percent") is not None:
        yield "error of the cost model", f"{ledger['cost_error_percent']:.1f} %"
    peaks = ledger.get("peak_memory_bytes_per_rank", [])
    largest = {where: max(peak.get(where, 0) for peak in peaks) for peak in peaks for where in peak}
    if largest:
        of = " of a rank" if len(peaks) > 1 else ""
        shown = "  ".join(f"{where} {size / 2**20:,.0f} MiB" for where, size in largest.items())
        yield f"peak memory{of}", shown
