"""The training run: the loop over the parts that build.py makes. What a step does is the pipeline's
business."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import torch

from freescale.config import RunConfig
from freescale.data.prefetch import prefetch
from freescale.ledger.collector import Collector
from freescale.pipeline.loss_watch import LossNotFinite
from freescale.pipeline.pipeline import Pipeline
from freescale.pipeline.serial import StepResult
from freescale.train.build import build_balancer, build_parallel, build_reducer, evaluate, histories
from freescale.train.checkpoint import Checkpoints, NotFinite
from freescale.train.learning_rate import learning_rate
from freescale.train.run_folder import RunFolder
from freescale.train.stopping import Stopping
from freescale.transport.api import Transport

_NOTHING_SUPERVISED = (
    "no user of {data.data} has events enough for --split {data.split}: leave-one-out needs 4 or "
    "more events of a user, "
    "--split none needs 2"
)
_DIVERGED = "lower --lr and --row-lr, or set --clip and --row-clip"
_COLLECT_EVERY = 50  # steps between two collections of the ranks' ledgers


class Watcher(Protocol):
    """Who shows a run to a person (progress bar, TensorBoard). Called on rank 0 only."""

    def started(self, folder: Path, lines: list[str], total: int, done: int) -> None: ...
    def stepped(self, entry: Mapping[str, Any]) -> None: ...
    def advanced(self, step: int) -> None: ...
    def evaluated(self, entry: Mapping[str, Any]) -> None: ...
    def finished(self) -> None: ...


class Trainer:
    """A run in a folder. Every rank makes one; `train` is a collective. `watcher` is rank 0's."""

    def __init__(
        self,
        config: RunConfig,
        path: Path,
        folder: Path | None,
        transport: Transport,
        watcher: Watcher | None = None,
        resume: bool = False,
    ) -> None:
        """`path`: the prepared histories. Builds everything and, with `resume`, loads the folder's
        last checkpoint. `folder` None: a new one under runs/."""
        self.config, self.path, self.transport, self.resume = config, path, transport, resume
        self._claimed = RunFolder(folder, resume, transport)
        self.watcher = watcher if transport.rank == 0 else None
        settings = config.train
        self.data = histories(config, path, transport)
        self.total = min(len(self.data), settings.steps or len(self.data))
        self.parallel = build_parallel(config, self.data, transport)
        self.optimizer = torch.optim.AdamW(
            self.parallel.dense_parameters(), lr=settings.lr, weight_decay=settings.weight_decay
        )
        self.pipeline = Pipeline(
            self.parallel,
            self.optimizer,
            schedule=settings.schedule,
            accumulate=settings.accumulate,
            clip=settings.clip,
            precision=settings.precision,
            learning_rate=learning_rate(settings.warmup, settings.decay, self.total),
            balancer=build_balancer(config, transport.device),
            reducer=build_reducer(config),
            dense_sums=config.train.dense_sums,
        )
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", transport, settings.keep_checkpoints
        )
        self._saved = 0  # the last step in a checkpoint
        if resume:
            self._load()
        else:
            self.parallel.tables.place(self.data.batch(0))
        # the folder is RunFolder's to refuse
        self.checkpoints.check(self.parallel, self.optimizer, step=None)

    @property
    def folder(self) -> Path:
        """A default name is final once training has begun."""
        return self._claimed.path

    def train(self, stopping: Stopping | None = None) -> dict[str, Any]:
        """Trains to the end of the configuration, or until a rank was asked to stop; returns the
        last loss, the test quality, the ledger (rank 0) and `stopped`: the number of the signal
        that ended it, or 0."""
        if self.pipeline.steps >= self.total:
            raise ValueError(
                f"{self.folder} is at step {self.pipeline.steps} of {self.total}: ask for more "
                "--epochs or --steps to go on"
            )
        self._open_folder()
        try:
            return self._train(stopping or Stopping(self.pipeline.stop, self.transport.rank))
        finally:
            self._claimed.close()

    def _train(self, stopping: Stopping) -> dict[str, Any]:
        if self.watcher:
            self.watcher.started(
                self.folder,
                [*self._claimed.notes, *self._describe()],
                self.total,
                self.pipeline.steps,
            )
        ledger, gather = self.pipeline.ledger, self.transport.gather_bytes
        collector = Collector(
            ledger,
            self.transport.rank,
            self.transport.world,
            gather,
            self.folder if self.transport.rank == 0 else None,
            offsets=self.transport.clock_offsets,
            trace_steps=self.config.train.trace_steps,
            resumed=self.resume,
        )
        results: dict[str, Any] = {}
        try:
            last = self._loop(collector, stopping)
        except LossNotFinite as error:
            raise ValueError(
                f"the loss is {error.loss} at step {error.step}: {_DIVERGED}"
            ) from error
        stopping.agreed()
        if last is not None:
            results["loss"] = last.loss
            self._checkpoint(last.number)
        stopping.saved = True
        results["ledger"] = collector.close(self.transport.device)
        # Whichever rank was told: all skip what is left.
        results["stopped"] = max(int(number) for number in gather(b"%d" % stopping.number))
        if not results["stopped"]:
            stopping.close()
        if self.config.data.split != "none" and not results["stopped"]:
            results["test"] = evaluate(self.config, self.parallel, self.path, "test", baseline=True)
            self._write({"step": self.pipeline.steps, "test": results["test"]})
        if self.watcher:
            self.watcher.finished()
        return results

    def _loop(self, collector: Collector, stopping: Stopping) -> StepResult | None:
        """Steps until the data or --steps ends, or somebody wants it to; the last step's result."""
        settings, result = self.config.train, None
        clock, seen, supervised = time.perf_counter(), 0, 0.0
        with closing(prefetch(self.data)) as batches:
            for result in self.pipeline.run(batches):
                step = result.step
                stopping.stepped()
                seen += self.data.batch_size(result.number)
                if step % settings.log_every == 0 or step == self.total:
                    loss = result.loss  # waits for the device, hence not every step
                    rate = seen / (time.perf_counter() - clock)
                    clock, seen = time.perf_counter(), 0
                    epoch = result.number // self.data.batches_per_epoch
                    self._write(
                        {"step": step, "epoch": epoch, "loss": loss, "samples_per_second": rate}
                    )
                if self.watcher:
                    self.watcher.advanced(step)
                if step % _COLLECT_EVERY == 0:
                    collector.collect()
                supervised += sum(result.counts.values())
                if not supervised and (
                    step == self.total or (result.number + 1) % self.data.batches_per_epoch == 0
                ):
                    raise ValueError(_NOTHING_SUPERVISED.format(data=self.config.data))
                with stopping.working():
                    self._validate(result.number, step)
                    if step >= self.total:
                        break
                    if step % settings.checkpoint_every == 0:
                        self._checkpoint(result.number)
        return result

    def _checkpoint(self, number: int) -> None:
        """Of the step just made, unless it is there."""
        if self._saved != self.pipeline.steps:
            self._save(number)
            self._saved = self.pipeline.steps

    def _save(self, number: int) -> None:
        """The data position is that of the last batch applied; prefetching may have read
        further."""
        progress = {
            "step": self.pipeline.steps,
            "pipeline": self.pipeline.state_dict(),
            "data": self.data.state_dict(number + 1),
        }
        try:
            self.checkpoints.save(self.parallel, self.optimizer, progress, self.pipeline.buckets)
        except NotFinite as error:
            raise ValueError(f"{error}; {_DIVERGED}") from None

    def _load(self) -> None:
        found = self.checkpoints.last_intact()
        if found is None:
            raise ValueError(f"nothing to resume: {self.checkpoints.folder} holds no checkpoint")
        progress = self.checkpoints.load(
            found, self.parallel, self.optimizer, self.pipeline.buckets
        )
        self.pipeline.load_state_dict(progress["pipeline"])
        self.data.load_state_dict(progress["data"])
        self._forget_after(progress["step"])

    def _open_folder(self) -> None:
        self._claimed.open(self.config.to_json())
        self.checkpoints.folder = self.folder / "checkpoints"

    def _validate(self, number: int, step: int) -> None:
        every = self.config.train.evaluate_every
        epochs, inside = divmod(number + 1, self.data.batches_per_epoch)
        if every and not inside and epochs % every == 0 and self.config.data.split != "none":
            quality = evaluate(self.config, self.parallel, self.path, "validation")
            self._write({"step": step, "epoch": epochs, "validation": quality})

    def _describe(self) -> list[str]:
        data = self.data
        parameters = sum(p.numel() for p in self.parallel.dense_parameters())
        device = self.transport.device.type
        compressed = build_reducer(self.config)
        about = (
            f" (the largest {1 - compressed.eta:.2%} of their gradients in a step)"
            if compressed
            else ""
        )
        if self.config.train.dense_sums == "partitioned":
            about = " (their gradients are summed by parts, over the transport)"
        return [
            f"{data.num_samples:,} users, {data.num_items:,} items; {self.transport.world} ranks "
            f"on {device}, "
            f"global batch {data.global_batch}, schedule {self.config.train.schedule}, balance "
            f"{self.config.train.balance}",
            f"{parameters:,} dense parameters{about}; {self.transport.about}",
            *self.parallel.tables.describe(),
        ]

    def _write(self, entry: dict[str, Any]) -> None:
        """A line of metrics.jsonl, on rank 0."""
        if self.transport.rank != 0:
            return
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(plain_json(entry) + "\n")
        if self.watcher:
            (self.watcher.stepped if "loss" in entry else self.watcher.evaluated)(entry)

    def _forget_after(self, step: int) -> None:
        """Lines that an interrupted run wrote past its last checkpoint: those steps are made
        again."""
        if self.transport.rank != 0:
            return
        for name, last in (("metrics.jsonl", step), ("ledger.jsonl", step - 1)):
            path = self.folder / name
            if path.exists():
                lines = [
                    line
                    for line in path.read_text(encoding="utf-8").splitlines(True)
                    if _step_of(line) <= last
                ]
                temporary = path.with_suffix(".tmp")
                temporary.write_text("".join(lines), encoding="utf-8")
                temporary.replace(path)


def plain_json(entry: Any) -> str:
    """JSON in which a metric that is not defined (AUC of one class) is null: NaN is no JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(entry))


def _step_of(line: str) -> float:
    """A half-written last line counts as past everything."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")
