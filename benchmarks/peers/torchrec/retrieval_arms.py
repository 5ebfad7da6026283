"""TorchRec trains the model that `freescale train` builds: the same Retrieval module, histories
file and batches, behind a row-wise sharded EmbeddingCollection instead of FreeScale's tables.

The head and the encoder are the objects that `freescale train` builds, from the same seed; the
table's first rows are FreeScale's. Three features read the table: history, targets, negatives. Row
optimizer, dense optimizer and precision are the configuration's. Batches are made ahead by the same
worker processes as in training, and put into TorchRec's form and pinned memory by a thread. A
rank's loss is its sum over positions times ranks / global count,
because TorchRec and DistributedDataParallel divide gradients by the number of ranks; the counts are
known before the first step, so that no arm communicates for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec_arms import OPTIMIZERS, PIPELINES, Shared, shard_model

# isort: split
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from freescale.batch import SequenceBatch
from freescale.config import RunConfig
from freescale.data.batches.loader import Histories
from freescale.data.batches.workers import prefetch, read_ahead
from freescale.embedding.layout import TableSpec
from freescale.embedding.storage.api import draw_initial_rows
from freescale.pipeline.precision import choose_precision, make_autocast, supports_bf16
from freescale.train.build import (
    build_module,
    build_row_optimizer,
    choose_row_std,
    load_histories,
)
from freescale.worker_server import count_workers

FEATURES = ("history", "targets", "negatives")
_CHUNK = 1 << 15  # rows that are drawn at a time


@dataclass
class Batch(Pipelineable):
    features: KeyedJaggedTensor
    samples: SequenceBatch
    scale: Tensor  # [2]: ranks / global count, 1 / global count

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.features.to(device, non_blocking),
            self.samples.to(device, non_blocking),
            self.scale.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)
        for tensor in (*self.samples.tensors(), self.scale):
            tensor.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.features.pin_memory(), self.samples.pin_memory(), self.scale.pin_memory())


class Rows(nn.Module):
    """In the place of the model's table: rows that are there already, found by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[Tensor, Tensor]] = []

    def forward(self, ids: Tensor) -> Tensor:
        rows = next(rows for known, rows in self.held if known is ids)
        return rows.view(*ids.shape, -1)


class Loss(nn.Module):
    """The Retrieval module on rows that TorchRec has looked up."""

    def __init__(self, module: nn.Module, precision: str, device: torch.device) -> None:
        super().__init__()
        self.module, self._precision, self._device = module, precision, device
        self.module.item = Rows()

    def forward(self, samples: SequenceBatch, rows: list[Tensor]) -> Tensor:
        """rows: of each feature [ids, width] -> the loss, summed over this rank's positions."""
        self.module.item.held = [
            (samples.values(name), found) for name, found in zip(FEATURES, rows, strict=True)
        ]
        with make_autocast(self._precision, self._device):
            total: Tensor = self.module(samples)["next_item"]
        self.module.item.held = []
        return total


class Model(nn.Module):
    def __init__(self, config: RunConfig, num_items: int, device: torch.device) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="item",
            num_embeddings=num_items,
            embedding_dim=config.model.width,
            feature_names=list(FEATURES),
        )
        self.embedding = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        precision, _ = choose_precision(
            config.train.precision, device.type, supports_bf16(device), float32=True
        )
        self.dense = Loss(build_module(config, num_items, 0), precision, device)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss to differentiate, and this rank's share of the global mean."""
        found = self.embedding(batch.features)
        loss = self.dense(batch.samples, [found[name].values() for name in FEATURES])
        return loss * batch.scale[0], loss.detach() * batch.scale[1]


class RetrievalArm:
    """One rank of TorchRec at work, with the verbs of `torchrec_arms.Arm`."""

    def __init__(
        self, config: RunConfig, histories: Path, pipeline: str, device: torch.device, batches: int
    ) -> None:
        """`batches`: that will be asked for, at most."""
        self.rank, world = dist.get_rank(), dist.get_world_size()
        train, self.device = config.train, device
        # load_histories asks for a transport's rank and number of ranks alone
        self._data = load_histories(config, histories, Shared(self.rank, world))
        model = Model(config, self._data.num_items, device)
        rows: Any = build_row_optimizer(config)
        fused: dict[str, Any] = {"learning_rate": train.row_lr}
        if train.row_optimizer == "adam":
            fused |= {"optimizer": EmbOptimType.ADAM, "eps": rows.eps}
            fused |= {"beta1": rows.betas[0], "beta2": rows.betas[1]}
        else:
            fused |= {"optimizer": OPTIMIZERS[train.row_optimizer]}
            fused |= {"eps": rows.eps} if hasattr(rows, "eps") else {}
        sharded, shard, first_row = shard_model(model, fused, world, device)
        self.replicated = sharded._dmp_wrapped_module
        _fill(shard, first_row, config, self._data.num_items)
        parameters = sharded.module.dense.parameters()
        optimizer = torch.optim.AdamW(
            parameters,
            lr=train.lr,
            betas=(0.9, train.beta2),
            weight_decay=train.weight_decay,
            fused=True,
        )
        counts, on_gpu = _count_positions(self._data, batches), device.type == "cuda"
        made = read_ahead(self._data, count_workers(config, device.type), pin=on_gpu).__enter__()
        self._feed: Iterator[Batch] = prefetch(_make_batches(made, world, counts, on_gpu))
        self._pipeline = PIPELINES[pipeline](sharded, optimizer, device)

    def progress(self) -> Tensor:
        """Trains on the next batch -> this rank's share of the loss."""
        return self._pipeline.progress(self._feed)

    def close(self) -> None:
        if self.device.type == "cpu":
            dist.barrier()


def _fill(shard: Tensor, first_row: int, config: RunConfig, num_items: int) -> None:
    """With the rows that FreeScale's table begins with."""
    width = config.model.width
    spec, std = TableSpec("item", num_items, width, torch.float32, FEATURES), choose_row_std(config)
    with torch.no_grad():
        for start in range(0, shard.shape[0], _CHUNK):
            piece = shard[start : start + _CHUNK]
            ids = torch.arange(first_row + start, first_row + start + piece.shape[0])
            piece.copy_(draw_initial_rows(spec, ids.to(shard.device), config.train.seed, std))


def _count_positions(data: Histories, batches: int) -> list[float]:
    """Supervised positions of each global batch, over all ranks."""
    own = [float(data.batch(number).weights["next_item"].sum()) for number in range(batches)]
    counts = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(counts, group=dist.new_group(backend="gloo"))
    return counts.tolist()


def _make_batches(
    made: Iterator[SequenceBatch], world: int, counts: list[float], pinned: bool
) -> Iterator[Batch]:
    """Those of the loader, as TorchRec takes them."""
    for samples, count in zip(made, counts, strict=False):
        lengths = [_measure_feature(samples, name) for name in FEATURES]
        features = KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.cat([samples.values(name).flatten() for name in FEATURES]),
            lengths=torch.cat(lengths),
        )
        batch = Batch(features, samples, torch.tensor([world / count, 1 / count]))
        yield batch.pin_memory() if pinned else batch


def _measure_feature(samples: SequenceBatch, name: str) -> Tensor:
    """Ids of each sample, [samples]. What belongs to the batch as a whole goes with the first."""
    if name in samples.sequences:
        return samples.sequences[name].lengths
    ids = samples.values(name)
    if name in samples.dense:
        return torch.full((len(samples),), ids[0].numel())
    lengths = torch.zeros(len(samples), dtype=torch.int64)
    lengths[0] = ids.numel()
    return lengths


def build(
    config: RunConfig, histories: Path, pipeline: str, device: torch.device, batches: int
) -> RetrievalArm:
    """Needs an initialised default process group."""
    return RetrievalArm(config, histories, pipeline, device, batches)
