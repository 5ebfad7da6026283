"""Shows a run in the terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from freescale.config.metrics import select_headlines
from freescale.pipeline.step_result import StepResult
from freescale.train.callbacks import Callback, Metrics, RunView
from freescale.transport.api import is_nearby

if TYPE_CHECKING:
    from rich.progress import Progress

    from freescale.data.batches.specs import NegativeSpec


class ConsoleProgress(Callback):
    """Shows a run on rank 0's terminal: a progress bar, or plain lines if the output is a file."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console()
        self._bar: Progress | None = None
        self._task: Any = None
        self._last_line = (-math.inf, -math.inf)  # step and seconds of the last line in a log

    def on_compile(self, trainer: RunView, done: int, count: int) -> None:
        if done == 0:
            self._print(
                f"compiling {count} GPU kernels, which later runs of this configuration reuse"
            )
        elif done == count or (self._console.is_terminal and done % 8 == 0):
            self._print(f"{done} of {count} GPU kernels compiled")

    def on_start(self, trainer: RunView) -> None:
        if trainer.rank != 0:
            return
        data = trainer.data
        features = () if data.features is None else data.features.lines
        lines = (f"run folder {trainer.folder}", *trainer.notes, *data.file.read_as, *features)
        for line in (*lines, *describe_run(trainer)):
            self._print(line)
        if self._console.is_terminal:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(
                "train", total=trainer.total, completed=trainer.step, note=""
            )
            self._bar.start()

    def on_step(self, trainer: RunView, step: StepResult) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step.step)

    def on_log(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        if trainer.rank != 0:
            return
        note = f"loss {entry['loss']:.4f}  {entry['samples_per_second']:.0f} samples/s"
        if self._bar:
            self._bar.update(self._task, note=note)
        elif self._is_due(entry["step"], trainer.total):
            self._print(f"step {entry['step']}  epoch {entry['epoch']}  {note}")

    def _is_due(self, step: int, total: int) -> bool:
        """Whether a log gets another line: one for 5 % of the run, or for a minute."""
        now, (last, seconds) = time.monotonic(), self._last_line
        if step - last < total / 20 and now - seconds < 60:
            return False
        self._last_line = (step, now)
        return True

    def on_rollback(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        back = entry["rollback"]
        self._print(
            f"the loss is {back['loss']} at step {back['at_step']}: back to the checkpoint of step "
            f"{entry['step']}, without batch {back['skipped_batch']} (--on-nonfinite rollback)"
        )

    def on_slow_step(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        slow = entry["slow_step"]
        self._print(
            f"warning: step {entry['step']} took {slow['seconds']:.2f} s, usual are "
            f"{slow['usual']:.2f} s: {slow['why']}"
        )

    def on_snapshot_interval(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        found = entry["snapshot_interval"]
        least = "costs at most 1 % and keeps up" if found["asked"] == "auto" else "keeps up"
        if trainer.rank == 0:
            self._print(
                f"a snapshot takes {found['seconds']:.2f} s: from now on there is one every "
                f"{found['steps']:,} steps, the shortest interval that {least} (--snapshot-every "
                f"{found['asked']})"
            )

    def on_snapshot_cost(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        found = entry["snapshot_cost"]
        if trainer.rank == 0:
            self._print(
                f"warning: a snapshot every {found['steps']:,} steps takes "
                f"{found['percent']:.1f} % of training; --snapshot-every auto keeps it to 1 %"
            )

    def on_evaluation(self, trainer: RunView, metrics: Metrics, part: str) -> None:
        if trainer.rank == 0 and part == "validation":  # the command shows the test part as a table
            found = metrics["model"].items()
            quality = {name: value for name, value in found if not math.isnan(value)}
            values = "  ".join(f"{name} {quality[name]:.4f}" for name in select_headlines(quality))
            best = trainer.best
            mark = "  best so far" if best is not None and best.step == trainer.step else ""
            part = "validation" if trainer.window is None else f"window {trainer.window['number']}"
            self._print(f"step {trainer.step}  {part}  {values}{mark}")

    def on_end(self, trainer: RunView, results: Mapping[str, Any]) -> None:
        if self._bar:
            self._bar.stop()

    def _print(self, line: str) -> None:
        # an error message may contain brackets, which are not markup
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


def describe_run(trainer: RunView) -> list[str]:
    """Lines about the data, the ranks, the model and its tables."""
    data, settings, transport = trainer.data, trainer.config.train, trainer.transport
    tables = trainer.model.tables
    parameters = sum(parameter.numel() for parameter in trainer.model.dense_parameters())
    drawn = f"; {describe_negatives(data.negatives)}" if data.sample.task == "retrieval" else ""
    items = f"{data.num_items:,} items"
    if data.any_ids:
        items = f"{data.num_items:,} different item ids" if data.num_items else "any item ids"
    wide = trainer.config.model.head == "dlrm" and transport.device.type == "cpu"
    ranks = f"{transport.world} rank{'s' * (transport.world > 1)}"
    samples = f"{data.num_samples:,} users"
    if data.time is not None:
        samples = f"{data.num_samples:,} samples in {len(data.windows):,} windows of time"
    return [
        f"{samples}, {items}{drawn}",
        f"{ranks} on {transport.device.type}, global batch {data.global_batch}, schedule "
        f"{settings.schedule}, balance {settings.balance}",
        f"{parameters:,} dense parameters",
        *(["the layers of --head dlrm run in plain torch: their kernels are for GPUs"] * wide),
        transport.about,
        *trainer.pipeline.describe_choices(),
        *tables.describe(),
        *([] if is_nearby(transport) else ["exchange {} ({})".format(*tables.exchange)]),
    ]


def describe_negatives(chosen: NegativeSpec) -> str:
    """Describes the negatives that targets compete with."""
    if chosen.source == "all":
        return f"full softmax over {chosen.count:,} items"
    text = f"{chosen.count} negatives per {chosen.per}"
    if chosen.source == "popularity":
        text += f" by popularity to the power of {chosen.popularity_power:g}"
    if chosen.in_batch_share:
        text += f", {chosen.in_batch_share:.0%} from the batch"
    return f"{text}, log-q corrected" if chosen.log_q else text
