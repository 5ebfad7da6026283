"""TorchRec's DLRM under TorchRec's own pipelines: every table row-wise over all ranks, with
row-wise Adagrad fused into the backward pass, the rest in DistributedDataParallel. Rows begin as
they do in FreeScale's arm, as a function of (seed, table, row)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from freescale_bench.torchrec.dlrm import (
    COLLECTION,
    DENSE_LR,
    ROW_EPSILON,
    Shape,
    build_dlrm,
    draw_rows,
    list_batches,
)
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec_arms import OPTIMIZERS, PIPELINES, shard_by_rows


class Arm:
    """One rank at work. `progress` trains on the next batch; it is a collective call."""

    def __init__(
        self, shape: Shape, rank: int, world: int, pipeline: str, device: torch.device
    ) -> None:
        model = build_dlrm(shape, "meta")
        sharder = EmbeddingBagCollectionSharder(
            fused_params={
                "optimizer": OPTIMIZERS["rowwise_adagrad"],
                "learning_rate": shape.row_lr,
                "eps": ROW_EPSILON,
            }
        )
        tables = [f"t{number}" for number in range(shape.tables)]
        sharded = shard_by_rows(model, COLLECTION, tables, sharder, world, device)
        for name, weight in sharded.state_dict().items():
            for shard in weight.local_shards() if hasattr(weight, "local_shards") else ():
                ids = torch.arange(shard.tensor.shape[0]) + shard.metadata.shard_offsets[0]
                shard.tensor.copy_(draw_rows(shape, name.removesuffix(".weight"), ids))
        self.device = device
        self.replicated: DistributedDataParallel = sharded._dmp_wrapped_module
        dense = torch.optim.SGD(
            [p for name, p in sharded.named_parameters() if COLLECTION not in name], lr=DENSE_LR
        )
        self._world = world
        self._pipeline = PIPELINES[pipeline](sharded, dense, device)
        batches = list_batches(shape, rank, world)
        if device.type == "cuda":
            batches = [batch.pin_memory() for batch in batches]
        self._feed = itertools.cycle(batches)

    def progress(self) -> Tensor:
        """Trains on the next batch -> this rank's share of the loss."""
        loss: Any = self._pipeline.progress(self._feed)[0]
        return loss.detach() / self._world

    def close(self) -> None:
        """All ranks leave together: what a pipeline has fetched ahead is still on the wire
        before."""
        if self.device.type == "cpu":
            dist.barrier()


def build(
    shape: Shape, rank: int, world: int, pipeline: str, device: torch.device | str = "cpu"
) -> Arm:
    """Needs an initialised default process group of `world` ranks."""
    return Arm(shape, rank, world, pipeline, torch.device(device))
