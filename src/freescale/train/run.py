"""A run in progress: its parts, and what falls due between its steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from freescale.config import RunConfig
from freescale.train.build import evaluate_part
from freescale.train.callbacks import CallbackList
from freescale.train.follow import Follower
from freescale.train.metrics_log import has_window
from freescale.train.position import Position
from freescale.train.run_folder import RunFolder
from freescale.train.run_state import RunState
from freescale.train.state.snapshots import Snapshots
from freescale.train.time_order import find_calendar
from freescale.transport.api import Transport
from freescale.worker_server import WorkerServer

_CLOCK_EVERY = 5  # steps


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
    follower: Follower | None = None
    # In order of time, the window that was evaluated last: its number and times.
    window: dict[str, int] | None = None
    saved: float = field(default_factory=time.monotonic)  # when the last checkpoint was begun

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
        if self.follower is not None:
            found = self.follower.window
            self.window = {key: found[key] for key in ("number", "from", "to")}
            return int(found["window"])
        number = time.windows.stop if part == "test" else self.position.next_window
        calendar = find_calendar(self.config, self.position.data.file)
        self.window = calendar.describe(number)
        return number

    def validate_if_due(self) -> None:
        """Evaluates the validation part at the end of an epoch if it is due: in order of time the
        next window, before it is trained. Saves a checkpoint if this is the best evaluation so far
        and the best checkpoint is kept."""
        every, position = self.config.train.evaluate_every, self.position
        if self.follower is not None:  # the next window is not there yet
            return
        if self.config.data.order == "time":
            every = None if position.is_before_test else every or 1
        due = every is not None and position.ends_epoch and position.epoch % every == 0
        if due and self.config.data.split != "none":
            self.evaluate("validation")
            best = position.best
            if best is not None and best.kept and best.step == position.step:
                self.save_checkpoint()

    def end_window(self) -> None:
        """After the last step of a window of a stream: saves, and calls `on_window`. After a resume
        at this place it is called again."""
        assert self.follower is not None
        self.save_checkpoint(last=True)
        entry = {"step": self.position.step, "stream": self.follower.report()}
        self.callbacks.call("on_window", entry)

    def begin_window(self) -> bool:
        """Waits for the next window of a stream, and evaluates it before it is trained. False: the
        run ends."""
        follower, position, limit = self.follower, self.position, self.config.data.windows
        assert follower is not None
        while limit is None or follower.window["number"] + 1 < limit:
            found = follower.find_next(follower.window["number"])
            if found is None:
                return False
            follower.open(position.data, found, position.data.stop)
            if position.data.num_samples:
                every, folder = self.config.train.evaluate_every or 1, self.folder.path
                known = self.transport.rank == 0 and has_window(folder, "window", found["number"])
                known = bool(self.transport.gather_bytes(b"1" if known else b"")[0])
                if found["number"] % every == 0 and not known:
                    self.evaluate("validation")
                return True
        return False

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

    def is_delta_due(self) -> bool:
        """Whether a checkpoint of this step is to be published. With --deltas SECONDS rank 0's
        clock decides, read every few steps."""
        due, position = self.config.train.deltas, self.position
        if not isinstance(due, int):  # a window of a stream is saved in any case
            return due is not None and position.ends_epoch
        if position.step % _CLOCK_EVERY:
            return False
        late = time.monotonic() - self.saved >= due
        return bool(self.transport.gather_bytes(b"1" * late)[0])

    def save_checkpoint(self, last: bool = False) -> None:
        """Saves this step, unless a hook has failed on a rank: then all ranks raise. An
        asynchronous checkpoint is complete at the next one, or at the `last`."""
        self.complete_checkpoint()
        self.callbacks.check()
        self.state.save()
        self.saved = time.monotonic()
        if last or not self.state.checkpoints.asynchronous:
            self.complete_checkpoint()

    def complete_checkpoint(self) -> None:
        """Waits for the checkpoint that is being written, if any, and calls `on_checkpoint`."""
        path = self.state.checkpoints.wait()
        if path is not None:
            self.callbacks.call("on_checkpoint", path)
            self.folder.upload()
