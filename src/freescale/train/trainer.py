"""The training run: builds the parts from a configuration, then loops. What a step does is the pipeline's business."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from freescale.config import RunConfig
from freescale.data.loader import Histories
from freescale.data.prefetch import prefetched
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.embedding.swap import Parallel, parallelize
from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU
from freescale.observe.collect import Collector
from freescale.pipeline.api import Pipeline
from freescale.pipeline.serial import StepResult
from freescale.train.checkpoint import Checkpoints
from freescale.train.evaluate import evaluate_ranking, evaluate_retrieval
from freescale.train.schedules import learning_rate
from freescale.transport.api import Transport

_COLLECT_EVERY = 50  # steps between two collections of the ranks' ledgers


class Watcher(Protocol):
    """Who shows a run to a person (progress bar, TensorBoard). Called on rank 0 only."""

    def started(self, lines: list[str], total: int, done: int) -> None: ...
    def stepped(self, entry: Mapping[str, Any]) -> None: ...
    def advanced(self, step: int) -> None: ...
    def evaluated(self, entry: Mapping[str, Any]) -> None: ...
    def finished(self) -> None: ...


def histories(config: RunConfig, path: Path, transport: Transport, part: str = "train") -> Histories:
    """One rank's data of a part of the split."""
    data, train = config.data, config.train
    training = part == "train"
    return Histories(
        path,
        train.global_batch if training else train.eval_batch,
        rank=transport.rank,
        world=transport.world,
        max_length=data.max_length,
        task=config.model.task,
        tasks=config.label_names,
        part=part,
        split=data.split,
        split_time=data.split_time,
        negatives=data.negatives,
        in_batch_share=data.in_batch_share,
        candidates=data.candidates,
        seed=train.seed,
        shuffle=data.shuffle and training,
        epochs=train.epochs if training else 1,
        num_items=data.num_items,
    )


def build_model(config: RunConfig, num_items: int, num_actions: int) -> nn.Module:
    """The model as a plain module; its tables are on the meta device, for parallelize to make."""
    model = config.model
    torch.manual_seed(config.train.seed)
    encoder = HSTU(
        width=model.width,
        layers=model.layers,
        heads=model.heads,
        max_length=config.data.max_length + (config.data.candidates if model.task == "ranking" else 0),
        dropout=model.dropout,
        position_bias=model.position_bias,
        time_bias=model.time_bias,
        checkpoint=model.recompute,
    )
    sizes: dict[str, Any] = {"num_items": num_items, "num_actions": num_actions, "table_device": "meta"}
    if model.task == "ranking":
        return Ranking(encoder, tasks=config.label_names, **sizes)
    return Retrieval(encoder, temperature=model.temperature, **sizes)


def build_parallel(config: RunConfig, data: Histories, transport: Transport) -> Parallel:
    train = config.train
    model = build_model(config, data.num_items, data.num_actions)
    return parallelize(
        model,
        model.features,  # type: ignore[arg-type]
        ROW_OPTIMIZERS[train.row_optimizer](lr=train.row_lr),
        transport=transport,
        placement=config.placements,
        init_std=config.model.width**-0.5,
        seed=train.seed,
        row_clip=train.row_clip,
    )


def evaluate(config: RunConfig, parallel: Parallel, path: Path, part: str, baseline: bool = False) -> dict[str, dict[str, float]]:
    """Metrics of the model on a part, the same on all ranks; with the popularity baseline beside it if asked."""
    data = histories(config, path, parallel.transport, part)
    if config.model.task == "ranking":
        return evaluate_ranking(parallel, data, config.label_names)
    popularity = None
    if baseline:
        popularity = histories(config, path, parallel.transport).item_counts()
    return evaluate_retrieval(parallel, data, popularity=popularity)


@dataclass
class Trainer:
    """A run in a folder. Every rank makes one; `train` is a collective."""

    config: RunConfig
    path: Path  # of the prepared histories
    folder: Path
    transport: Transport
    watcher: Watcher | None = None  # rank 0's
    resume: bool = False
    results: dict[str, Any] = field(default_factory=dict)

    def train(self) -> dict[str, Any]:
        """Trains to the end of the configuration; returns the last loss, the evaluation and the ledger (rank 0)."""
        config, transport = self.config, self.transport
        data = histories(config, self.path, transport)
        total = min(len(data), config.train.steps or len(data))
        parallel = build_parallel(config, data, transport)
        optimizer = torch.optim.AdamW(parallel.dense_parameters(), lr=config.train.lr, weight_decay=config.train.weight_decay)
        pipeline = Pipeline(
            parallel,
            optimizer,
            schedule=config.train.schedule,
            accumulate=config.train.accumulate,
            clip=config.train.clip,
            precision=config.train.precision,
            learning_rate=learning_rate(config.train.warmup, config.train.decay, total),
        )
        checkpoints = Checkpoints(self.folder / "checkpoints", transport, config.train.keep_checkpoints)
        if self.resume:
            latest = checkpoints.latest()
            if latest is None:
                raise ValueError(f"nothing to resume: {checkpoints.folder} holds no checkpoint")
            progress = checkpoints.load(latest, parallel, optimizer)
            pipeline.load_state_dict(progress["pipeline"])
            data.load_state_dict(progress["data"])
            self._forget_after(progress["step"])
        elif not parallel.tables.placed:
            parallel.tables.place(data.batch(0))
        self._open_folder()
        if transport.rank == 0 and self.watcher:
            self.watcher.started(self._describe(parallel, data), total, pipeline.steps)
        collector = Collector(
            transport.ledger,
            transport.rank,
            transport.world,
            transport.gather_bytes,
            self.folder if transport.rank == 0 else None,
            offsets=transport.clock_offsets,
            trace_steps=config.train.trace_steps,
        )

        def save(result_number: int) -> None:
            progress = {"step": pipeline.steps, "pipeline": pipeline.state_dict(), "data": data.state_dict(result_number + 1)}
            checkpoints.save(parallel, optimizer, progress)

        clock, seen, last = time.perf_counter(), 0, data.start - 1
        result: StepResult | None = None
        batches = prefetched(data)
        if pipeline.steps < total:
            for result in pipeline.run(batches):
                last, step = result.number, pipeline.steps
                seen += data.batch_size(last)
                if step % config.train.log_every == 0 or step == total:
                    loss = result.loss
                    now = time.perf_counter()
                    rate = seen / (now - clock)
                    clock, seen = now, 0
                    self._write({"step": step, "epoch": last // data.batches_per_epoch, "loss": loss, "samples_per_second": rate})
                if transport.rank == 0 and self.watcher:
                    self.watcher.advanced(step)
                if step % _COLLECT_EVERY == 0:
                    collector.collect()
                if step >= total:
                    break
                if step % config.train.checkpoint_every == 0:
                    save(last)
                self._validate(parallel, data, last, step)
        batches.close()  # type: ignore[attr-defined]
        save(last)
        self.results["ledger"] = collector.close(transport.device)
        if result is not None:
            self.results["loss"] = result.loss
        if config.data.split != "none":
            self.results["test"] = evaluate(config, parallel, self.path, "test", baseline=True)
            self._write({"step": pipeline.steps, "test": self.results["test"]})
        if transport.rank == 0 and self.watcher:
            self.watcher.finished()
        return self.results

    def _open_folder(self) -> None:
        """Once nothing can be refused any more: a run that never began leaves no folder."""
        if self.transport.rank == 0 and not self.resume:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.json").write_text(self.config.to_json(), encoding="utf-8")
        self.transport.gather_bytes(b"")

    def _validate(self, parallel: Parallel, data: Histories, number: int, step: int) -> None:
        every = self.config.train.evaluate_every
        epochs, inside = divmod(number + 1, data.batches_per_epoch)
        if every and not inside and epochs % every == 0 and self.config.data.split != "none":
            quality = evaluate(self.config, parallel, self.path, "validation")
            self._write({"step": step, "epoch": epochs, "validation": quality})

    def _describe(self, parallel: Parallel, data: Histories) -> list[str]:
        parameters = sum(p.numel() for p in parallel.dense_parameters())
        device = self.transport.device.type
        return [
            f"{data.num_samples:,} users, {data.num_items:,} items; {self.transport.world} ranks on {device}, "
            f"global batch {data.global_batch}, schedule {self.config.train.schedule}",
            f"{parameters:,} dense parameters",
            *parallel.tables.describe(),
        ]

    def _write(self, entry: dict[str, Any]) -> None:
        """A line of metrics.jsonl, on rank 0."""
        if self.transport.rank != 0:
            return
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self.watcher:
            (self.watcher.stepped if "loss" in entry else self.watcher.evaluated)(entry)

    def _forget_after(self, step: int) -> None:
        """Lines that an interrupted run wrote past its last checkpoint: those steps are made again."""
        if self.transport.rank != 0:
            return
        for name, last in (("metrics.jsonl", step), ("ledger.jsonl", step - 1)):
            path = self.folder / name
            if path.exists():
                lines = [line for line in path.read_text(encoding="utf-8").splitlines(True) if _step_of(line) <= last]
                temporary = path.with_suffix(".tmp")
                temporary.write_text("".join(lines), encoding="utf-8")
                temporary.replace(path)


def _step_of(line: str) -> float:
    """A half-written last line counts as past everything."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")
