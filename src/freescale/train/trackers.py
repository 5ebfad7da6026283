"""Sends the metrics of a run to TensorBoard, MLflow or Weights & Biases, from rank 0.

MLflow and W&B are services, which may be slow or gone: a thread sends what the run leaves in a
queue, and training never waits for it but at its end, for `PATIENCE` seconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import queue
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from freescale.train.callbacks import Callback, Metrics, RunView
from freescale.train.state.holder_link import read_run_id

PATIENCE = 30.0  # seconds
_ROOM = 10_000  # entries in the queue

Values = Mapping[str, float]


class Tracker(Callback, ABC):
    """Hands each log entry and evaluation of a run to `write`. Subclasses say where to."""

    @abstractmethod
    def open(self, trainer: RunView) -> None:
        """Begins a run there, or continues it."""

    @abstractmethod
    def write(self, values: Values, step: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def run(self, work: Callable[[], None]) -> None:
        """Calls `work`; elsewhere perhaps."""
        work()

    def on_start(self, trainer: RunView) -> None:
        if trainer.rank == 0:
            self.run(lambda: self.open(trainer))

    def on_log(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        self._send(trainer, {name: value for name, value in entry.items() if name != "step"})

    def on_evaluation(self, trainer: RunView, metrics: Metrics, part: str) -> None:
        self._send(trainer, {f"{part}/{name}": each for name, each in metrics["model"].items()})

    def _send(self, trainer: RunView, values: Mapping[str, Any]) -> None:
        kept = {n: float(v) for n, v in values.items() if isinstance(v, (int, float))}
        finite, step = {n: v for n, v in kept.items() if math.isfinite(v)}, trainer.step
        if trainer.rank == 0:
            self.run(lambda: self.write(finite, step))

    def on_end(self, trainer: RunView, results: Mapping[str, Any]) -> None:
        if trainer.rank == 0:
            self.run(self.close)


class TensorBoardLog(Tracker):
    """Writes TensorBoard events into the run's folder."""

    def open(self, trainer: RunView) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(trainer.folder / "tensorboard"))

    def write(self, values: Values, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Service(Tracker):
    """A tracker that may fail: then it says so once, and the run goes on without it."""

    name = package = ""

    def __init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise ValueError(f"{self.package} is not installed: pip install {self.package}")
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(_ROOM)
        self._thread: threading.Thread | None = None
        self._failed = False

    def run(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            # a daemon: a client that hangs does not keep the process
            self._thread = threading.Thread(target=self._carry, name=self.name, daemon=True)
            self._thread.start()
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self._warn("it is too slow")

    def on_end(self, trainer: RunView, results: Mapping[str, Any]) -> None:
        super().on_end(trainer, results)
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._work.put_nowait(None)
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                self._warn(f"it did not answer within {PATIENCE:.0f} s after the end")

    def _carry(self) -> None:
        while (work := self._work.get()) is not None:
            if self._failed:
                continue
            try:
                work()
            except Exception as error:  # whatever a client raises
                self._warn(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")

    def _warn(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            print(
                f"warning: {self.name} has not got all metrics ({why}); metrics.jsonl has them",
                file=sys.stderr, flush=True,
            )  # fmt: skip


class MLflowLog(_Service):
    """Logs to MLflow, where MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say. A resumed run
    continues there, too."""

    name, package = "MLflow", "mlflow"

    def open(self, trainer: RunView) -> None:
        import mlflow

        self._client = mlflow.MlflowClient()
        experiment = mlflow.set_experiment(_find_experiment()).experiment_id
        tag = read_run_id(trainer.folder)
        found = self._client.search_runs([experiment], f"tags.`freescale.run` = '{tag}'")
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {"freescale.run": tag, "mlflow.runName": trainer.folder.name}
        self._run = self._client.create_run(experiment, tags=tags).info.run_id
        settings = [
            mlflow.entities.Param(name, str(value)[:500])
            for name, value in flatten_settings(trainer).items()
        ]
        for first in range(0, len(settings), 100):  # as many as a request may have
            self._client.log_batch(self._run, params=settings[first : first + 100])

    def write(self, values: Values, step: int) -> None:
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis()
        named = ((name.replace("@", "_at_"), value) for name, value in values.items())
        metrics = [Metric(name, value, now, step) for name, value in named]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class WandbLog(_Service):
    """Logs to Weights & Biases, as its environment variables say: WANDB_PROJECT, WANDB_MODE. A
    resumed run continues there, too."""

    name, package = "Weights & Biases", "wandb"

    def open(self, trainer: RunView) -> None:
        import wandb

        self._run = wandb.init(
            id=read_run_id(trainer.folder),
            name=trainer.folder.name,
            resume="allow",
            config=flatten_settings(trainer),
            dir=str(trainer.folder),
        )
        # its own count of steps may not go back, as a resumed run does
        self._run.define_metric("*", step_metric="step")

    def write(self, values: Values, step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[], Tracker]] = {"mlflow": MLflowLog, "wandb": WandbLog}


def flatten_settings(trainer: RunView) -> dict[str, Any]:
    """The settings of a run by name, as `train.lr`."""
    found: dict[str, Any] = {}
    for group, settings in asdict(trainer.config).items():
        if isinstance(settings, Mapping):
            found |= {f"{group}.{name}": value for name, value in settings.items()}
    return found | {"ranks": trainer.transport.world}


def _find_experiment() -> str:
    from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

    return MLFLOW_EXPERIMENT_NAME.get() or "freescale"
