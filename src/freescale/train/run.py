"""A run in progress: its parts, and what falls due between its steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from freescale.config import RunConfig
from freescale.train.build import evaluate_part
from freescale.train.callbacks import CallbackList
from freescale.train.position import Position
from freescale.train.run_folder import RunFolder
from freescale.train.run_state import RunState
from freescale.train.state.snapshots import Snapshots
from freescale.train.time_order import find_calendar
from freescale.transport.api import Transport
from freescale.worker_server import WorkerServer


@dataclass
class Run:
    """The parts of a run. `Trainer` builds them; the training loop and `resume` work on them. All
    methods are collectives."""

    config: RunConfig
    histories: Path  # the prepared histories file
    folder: RunFolder
    state: RunState
    snapshots: Snapshots | None
    callbacks: CallbackList
    worker_server: WorkerServer | None  # data workers are forked from it
    # In order of time, the window that was evaluated last: its number and times.
    window: dict[str, int] | None = None

    @property
    def position(self) -> Position:
        return self.state.position

    @property
    def transport(self) -> Transport:
        return self.state.model.transport

    def evaluate(self, part: str) -> dict[str, dict[str, float]]:
        """Evaluates a part with the model as it is, and notes it if it is the best validation."""
        best, model = self.position.best, self.state.model
        metrics = evaluate_part(
            self.config,
            model,
            self.histories,
            part,
            baseline=part == "test",
            window=self._choose_window(part),
        )
        if best is not None and part == "validation" and self.folder.is_open:
            best.note(self.position.step, metrics["model"])
        self.callbacks.call("on_evaluation", metrics, part)
        return metrics

    def _choose_window(self, part: str) -> int | None:
        """In order of time, the window of a part: the next one for validation. Noted for logs."""
        time = self.position.data.time
        if time is None:
            return None
        number = time.windows.stop if part == "test" else self.position.next_window
        calendar = find_calendar(self.config, self.position.data.file)
        self.window = calendar.describe(number)
        return number

    def validate_if_due(self) -> None:
        """Evaluates the validation part at the end of an epoch if it is due: in order of time the
        next window, before it is trained. Saves a checkpoint if this is the best evaluation so far
        and the best checkpoint is kept."""
        every, position = self.config.train.evaluate_every, self.position
        if self.config.data.order == "time":
            every = None if position.is_before_test else every or 1
        due = every is not None and position.ends_epoch and position.epoch % every == 0
        if due and self.config.data.split != "none":
            self.evaluate("validation")
            best = position.best
            if best is not None and best.kept and best.step == position.step:
                self.save_checkpoint()

    def test(self) -> dict[str, dict[str, float]]:
        """Evaluates the test part, with the best checkpoint if that is kept."""
        best, checkpoints = self.position.best, self.state.checkpoints
        if best is not None and best.kept and best.step not in (None, self.position.step):
            checkpoints.load(checkpoints.find("best"), self.state.model)
        return self.evaluate("test")

    def take_snapshot(self) -> None:
        """Begins a snapshot of this step if one is due."""
        if self.snapshots is None:
            return
        state, failed = self.state, self.callbacks.failure is not None
        line = self.snapshots.take_if_due(
            self.position.step, state.model.tables, state.collect, failed
        )
        if line is not None:
            (kind,) = line
            self.callbacks.call(f"on_{kind}", {"step": self.position.step, **line})

    def save_checkpoint(self, last: bool = False) -> None:
        """Saves this step, unless a hook has failed on a rank: then all ranks raise. An
        asynchronous checkpoint is complete at the next one, or at the `last`."""
        self.complete_checkpoint()
        self.callbacks.check()
        self.state.save()
        if last or not self.state.checkpoints.asynchronous:
            self.complete_checkpoint()

    def complete_checkpoint(self) -> None:
        """Waits for the checkpoint that is being written, if any, and calls `on_checkpoint`."""
        path = self.state.checkpoints.wait()
        if path is not None:
            self.callbacks.call("on_checkpoint", path)
            self.folder.upload()
