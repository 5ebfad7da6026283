"""The training run: builds the parts from a configuration, then loops. What a step does is the pipeline's business."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.registry import find_partitioner
from freescale.compress.dense import Thresholding
from freescale.config import RunConfig
from freescale.data.loader import Histories
from freescale.data.prefetch import prefetched
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.embedding.swap import Parallel, parallelize
from freescale.kernels.segments import Segments
from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU
from freescale.models.segments import SegmentedHSTU
from freescale.observe.collect import Collector
from freescale.pipeline.api import Pipeline
from freescale.pipeline.serial import StepResult
from freescale.train.checkpoint import Checkpoints, NotFinite
from freescale.train.evaluate import evaluate_ranking, evaluate_retrieval
from freescale.train.schedules import learning_rate
from freescale.transport.api import Transport

_NOTHING_SUPERVISED = (
    "no user of {data.data} has events enough for --split {data.split}: leave-one-out needs 4 or more events of a user, "
    "--split none needs 2"
)
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
    names = ("segment", "segment_tokens", "segment_weight", "segment_pooling")
    segments = {} if model.segment is None else {name: getattr(model, name) for name in names}
    encoder = (SegmentedHSTU if segments else HSTU)(
        width=model.width,
        layers=model.layers,
        heads=model.heads,
        max_length=config.data.max_length + (config.data.candidates if model.task == "ranking" else 0),
        dropout=model.dropout,
        position_bias=model.position_bias,
        time_bias=model.time_bias,
        checkpoint=model.recompute,
        **segments,
    )
    sizes: dict[str, Any] = {"num_items": num_items, "num_actions": num_actions, "table_device": "meta"}
    if model.task == "ranking":
        return Ranking(encoder, tasks=config.label_names, **sizes)
    return Retrieval(encoder, temperature=model.temperature, **sizes)


def build_balancer(config: RunConfig, device: torch.device) -> Balancer | None:
    """Costs come from the model's shapes. They stay as they are, so that assignments depend on the data alone, or are adapted."""
    if config.train.balance == "none":
        return None
    model = config.model
    cost = CostModel.of_hstu(
        width=model.width,
        layers=model.layers,
        heads=model.heads,
        d_qk=model.width // model.heads,
        d_v=model.width // model.heads,
        negatives=config.data.negatives if model.task == "retrieval" else 0,
        tasks=len(config.label_names),
    )
    partitioner = find_partitioner(config.train.balance, device)
    segments = None if model.segment is None else Segments(model.segment, model.segment_tokens)
    return Balancer(partitioner, cost, config.train.balance_cap, adapt=config.train.balance_adapt, segments=segments)


def build_reducer(config: RunConfig) -> Thresholding | None:
    """None: the exact sum."""
    eta = config.train.compress_dense
    return None if eta is None else Thresholding(eta, config.train.compress_every)


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
        wire_dtype=torch.bfloat16 if train.wire_precision == "bf16" else None,
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


class Trainer:
    """A run in a folder. Every rank makes one; `train` is a collective. `watcher` is rank 0's."""

    def __init__(
        self,
        config: RunConfig,
        path: Path,
        folder: Path,
        transport: Transport,
        watcher: Watcher | None = None,
        resume: bool = False,
    ) -> None:
        """`path`: the prepared histories. Builds everything and, with `resume`, loads the folder's last checkpoint."""
        self.config, self.path, self.folder, self.transport, self.resume = config, path, folder, transport, resume
        self.watcher = watcher if transport.rank == 0 else None
        settings = config.train
        self.data = histories(config, path, transport)
        self.total = min(len(self.data), settings.steps or len(self.data))
        self.parallel = build_parallel(config, self.data, transport)
        self.optimizer = torch.optim.AdamW(self.parallel.dense_parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
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
        self.checkpoints = Checkpoints(folder / "checkpoints", transport, settings.keep_checkpoints)
        if resume:
            self._load()
        else:
            self.parallel.tables.place(self.data.batch(0))
        self.checkpoints.check(self.parallel, self.optimizer, self.pipeline.steps)

    def train(self) -> dict[str, Any]:
        """Trains to the end of the configuration; returns the last loss, the test quality and the ledger (rank 0)."""
        if self.pipeline.steps >= self.total:
            raise ValueError(
                f"{self.folder} is at step {self.pipeline.steps} of {self.total}: ask for more --epochs or --steps to go on"
            )
        self._open_folder()
        if self.watcher:
            self.watcher.started(self._describe(), self.total, self.pipeline.steps)
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
        last = self._loop(collector)
        results["loss"] = last.loss
        self._save(last.number)
        results["ledger"] = collector.close(self.transport.device)
        if self.config.data.split != "none":
            results["test"] = evaluate(self.config, self.parallel, self.path, "test", baseline=True)
            self._write({"step": self.pipeline.steps, "test": results["test"]})
        if self.watcher:
            self.watcher.finished()
        return results

    def _loop(self, collector: Collector) -> StepResult:
        """Steps until the data or --steps ends; the last step's result."""
        settings, result = self.config.train, None
        clock, seen, supervised = time.perf_counter(), 0, 0.0
        with closing(prefetched(self.data)) as batches:
            for result in self.pipeline.run(batches):
                step = result.step
                seen += self.data.batch_size(result.number)
                if step % settings.log_every == 0 or step == self.total:
                    loss = result.loss  # waits for the device, hence not every step
                    if not math.isfinite(loss):  # the same on every rank: all stop here
                        raise ValueError(
                            f"the loss is {loss} at step {step}: lower --lr and --row-lr, or set --clip and --row-clip"
                        )
                    rate = seen / (time.perf_counter() - clock)
                    clock, seen = time.perf_counter(), 0
                    epoch = result.number // self.data.batches_per_epoch
                    self._write({"step": step, "epoch": epoch, "loss": loss, "samples_per_second": rate})
                if self.watcher:
                    self.watcher.advanced(step)
                if step % _COLLECT_EVERY == 0:
                    collector.collect()
                supervised += sum(result.counts.values())
                if not supervised and (step == self.total or (result.number + 1) % self.data.batches_per_epoch == 0):
                    raise ValueError(_NOTHING_SUPERVISED.format(data=self.config.data))
                self._validate(result.number, step)
                if step >= self.total:
                    break
                if step % settings.checkpoint_every == 0:
                    self._save(result.number)
        assert result is not None
        return result

    def _save(self, number: int) -> None:
        """The data position is that of the last batch applied; prefetching may have read further."""
        progress = {
            "step": self.pipeline.steps,
            "pipeline": self.pipeline.state_dict(),
            "data": self.data.state_dict(number + 1),
        }
        try:
            self.checkpoints.save(self.parallel, self.optimizer, progress, self.pipeline.buckets)
        except NotFinite as error:
            raise ValueError(f"{error}. Lower --lr and --row-lr, or set --clip and --row-clip") from None

    def _load(self) -> None:
        found = self.checkpoints.last_intact()
        if found is None:
            raise ValueError(f"nothing to resume: {self.checkpoints.folder} holds no checkpoint")
        progress = self.checkpoints.load(found, self.parallel, self.optimizer, self.pipeline.buckets)
        self.pipeline.load_state_dict(progress["pipeline"])
        self.data.load_state_dict(progress["data"])
        self._forget_after(progress["step"])

    def _open_folder(self) -> None:
        """Once nothing can be refused any more: a run that never began leaves no folder."""
        if self.transport.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = self.folder / "config.json.tmp"
            temporary.write_text(self.config.to_json(), encoding="utf-8")
            temporary.replace(self.folder / "config.json")
        self.transport.gather_bytes(b"")

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
        about = f" (the largest {1 - compressed.eta:.2%} of their gradients in a step)" if compressed else ""
        if self.config.train.dense_sums == "parts":
            about = " (their gradients are summed by parts, over the transport)"
        return [
            f"{data.num_samples:,} users, {data.num_items:,} items; {self.transport.world} ranks on {device}, "
            f"global batch {data.global_batch}, schedule {self.config.train.schedule}, balance {self.config.train.balance}",
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
