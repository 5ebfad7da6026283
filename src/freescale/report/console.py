"""What a person sees of a run in the terminal: progress, metrics, the ledger as a table.
TensorBoard beside it if asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from freescale.config import TrainConfig


class RunView:
    """Shows a training run. On a terminal a progress bar; in a log plain lines."""

    def __init__(self, tensorboard: bool = TrainConfig.tensorboard) -> None:
        self.console = Console()
        self._progress: Progress | None = None
        self._task: Any = None
        self._tensorboard = tensorboard
        self._writer: Any = None

    def started(self, folder: Path, lines: list[str], total: int, done: int) -> None:
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"))
        self.console.print(f"run folder {folder}", highlight=False, soft_wrap=True)
        for line in lines:
            self.console.print(line, highlight=False, soft_wrap=True)
        if self.console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._progress = Progress(*columns, console=self.console)
            self._task = self._progress.add_task("train", total=total, completed=done, note="")
            self._progress.start()

    def advanced(self, step: int) -> None:
        if self._progress:
            self._progress.update(self._task, completed=step)

    def stepped(self, entry: Mapping[str, Any]) -> None:
        note = f"loss {entry['loss']:.4f}  {entry['samples_per_second']:.0f} samples/s"
        if self._progress:
            self._progress.update(self._task, note=note)
        else:
            self.console.print(
                f"step {entry['step']}  epoch {entry['epoch']}  {note}",
                highlight=False,
                soft_wrap=True,
            )
        if self._writer:
            self._writer.add_scalar("loss", entry["loss"], entry["step"])
            self._writer.add_scalar(
                "samples_per_second", entry["samples_per_second"], entry["step"]
            )

    def evaluated(self, entry: Mapping[str, Any]) -> None:
        part = "test" if "test" in entry else "validation"
        if part == "validation":
            values = "  ".join(
                f"{name} {value:.4f}" for name, value in entry[part]["model"].items()
            )
            self.console.print(
                f"step {entry['step']}  validation  {values}", highlight=False, soft_wrap=True
            )
        if self._writer:
            for name, value in entry[part]["model"].items():
                self._writer.add_scalar(f"{part}/{name}", value, entry["step"])

    def finished(self) -> None:
        if self._progress:
            self._progress.stop()
        if self._writer:
            self._writer.close()


def print_quality(
    console: Console, quality: Mapping[str, Mapping[str, float]], part: str = "test"
) -> None:
    """Metrics of the model, and of the baselines beside it."""
    table = Table(
        title=f"{part} part, full catalogue" if "hr@10" in quality["model"] else f"{part} part"
    )
    table.add_column("metric")
    for name in quality:
        table.add_column(name, justify="right")
    if "popularity" in quality:
        table.add_column("ratio", justify="right")
    for metric, value in quality["model"].items():
        row = [metric, *(f"{quality[name].get(metric, float('nan')):.4f}" for name in quality)]
        if "popularity" in quality:
            base = quality["popularity"][metric]
            row.append(f"{value / base:.2f}" if base else "-")
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
