"""TorchRec as benchmark arms: the shared workload under TrainPipelineBase, TrainPipelineSparseDist
and, on GPUs, the stale TrainPipelineSemiSync; `pec.py` has TrainPipelinePEC.

The table is one row-wise sharded EmbeddingCollection with its optimizer fused into the backward
pass, the dense layers are what DistributedModelParallel makes of them (DistributedDataParallel),
the process group is whatever the caller has initialised (gloo; NCCL on GPUs). Both TorchRec's row
gradients and DDP's dense gradients come out divided by the number of ranks, so a rank's loss is its
sum over samples times ranks / global count: the update is then the one that `workload` defines.

Settings are TorchRec's own defaults; `sparse_dist_late` is TrainPipelineSparseDist with
`enqueue_batch_after_forward`. Tried and left: 32-bit ids (no difference).
Not there on CPU: any kernel but the fused one (fbgemm's dense CPU kernel pools, whatever it is
told), and TorchRec's own index deduplication. `deduplicate` is what a user could do before TorchRec
instead: send each id of a rank's batch once, and spread the rows over the tokens in the model.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# TorchRec warns about CUDA parts that a CPU build lacks, and logs every plan.
warnings.filterwarnings("ignore", module=r"(torchrec|fbgemm_gpu|torch\.jit)(\..*)?")
logging.getLogger("torchrec").setLevel(logging.ERROR)

from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from freescale_bench.common.workload import (  # noqa: E402
    Dense,
    Workload,
    fill_table,
    make_batches,
    make_dense_optimizer,
)
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor  # noqa: E402
from torchrec.distributed.embedding import EmbeddingCollectionSharder  # noqa: E402
from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: E402
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise  # noqa: E402
from torchrec.distributed.train_pipeline import (  # noqa: E402
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.types import (  # noqa: E402
    CacheAlgorithm,
    CacheParams,
    ModuleSharder,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.streamable import Pipelineable  # noqa: E402


def _semi_sync(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Any:
    """Stale from the first batch on; by default it would be so from the 900th."""
    from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

    return TrainPipelineSemiSync(model, optimizer, device, start_batch=0)


def _pec(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Any:
    from pec import CpuPipelinePEC

    return CpuPipelinePEC(model, optimizer, device)


PIPELINES = {
    "semi_sync": _semi_sync,
    "pec": _pec,
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "prefetch_sparse_dist": PrefetchTrainPipelineSparseDist,
    "sparse_dist_late": partial(TrainPipelineSparseDist, enqueue_batch_after_forward=True),
}
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


@dataclass
class Batch(Pipelineable):
    features: KeyedJaggedTensor
    # [tokens] int64: row of each token among the features' values; empty where that is the token's
    # own
    places: Tensor
    lengths: Tensor  # [samples] int64
    labels: Tensor  # [samples] float32
    host_lengths: Tensor  # the lengths, which stay on the CPU

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.features.to(device, non_blocking),
            self.places.to(device, non_blocking=non_blocking),
            self.lengths.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.host_lengths,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        if self.labels.is_cuda:  # PEC calls it on CPU, too, where tensors refuse it
            for part in (self.features, self.places, self.lengths, self.labels):
                part.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(
            self.features.pin_memory(),
            self.places.pin_memory(),
            self.lengths.pin_memory(),
            self.labels.pin_memory(),
            self.host_lengths,
        )


class Model(nn.Module):
    def __init__(self, workload: Workload, world: int, deduplicate: bool, pec: bool) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="item",
            num_embeddings=workload.rows,
            embedding_dim=workload.width,
            feature_names=["history"],
        )
        self.embedding: nn.Module = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        if pec:
            from pec import PECEmbeddingCollection

            self.embedding = PECEmbeddingCollection(self.embedding)
        self.dense = Dense(workload)
        # ranks / global count: every rank has the same number of samples
        self.scale = 1.0 / workload.samples
        self.share = 1.0 / (workload.samples * world)
        self.deduplicate = deduplicate

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss to differentiate, and this rank's share of the global mean."""
        rows = self.embedding(batch.features)["history"].values()
        if self.deduplicate:
            rows = rows.index_select(0, batch.places)
        loss = self.dense(rows, batch.lengths, batch.labels, batch.host_lengths)
        return loss * self.scale, loss.detach() * self.share


def _feed(
    workload: Workload, rank: int, world: int, deduplicate: bool, pinned: bool
) -> Iterator[Batch]:
    """The workload's batches over and over: a pipeline that fetches ahead never sees an end."""
    none = torch.empty(0, dtype=torch.int64)
    made = []
    for ids, lengths, labels in make_batches(workload, rank, world):
        if deduplicate:
            values, places = torch.unique(ids, return_inverse=True)
            per_sample = torch.tensor([values.numel()])
        else:
            values, places, per_sample = ids, none, lengths
        features = KeyedJaggedTensor(keys=["history"], values=values, lengths=per_sample)
        batch = Batch(features, places, lengths, labels, lengths)
        made.append(batch.pin_memory() if pinned else batch)
    yield from itertools.cycle(made)


@dataclass(frozen=True)
class Shared:
    """Which of the ranks this is."""

    rank: int
    world: int


def shard_by_rows(
    model: nn.Module,
    path: str,
    tables: Sequence[str],
    sharder: ModuleSharder,
    world: int,
    device: torch.device,
    cache: float | None = None,
) -> DistributedModelParallel:
    """The model with the tables of the collection at `path` sharded by rows, others replicated.
    `cache`: the tables are in unified memory, behind a cache on the GPU of this share of them."""
    kernel = "fused" if cache is None else "fused_uvm_caching"
    plan = construct_module_sharding_plan(
        model.get_submodule(path),
        {name: row_wise(compute_kernel=kernel) for name in tables},
        sharder=sharder,
        # GPU ranks may share one, each as a host of its own
        local_size=world if device.type == "cpu" else 1,
        world_size=world,
        device_type=device.type,
    )
    if cache is not None:
        for name in tables:
            plan[name].cache_params = CacheParams(
                algorithm=CacheAlgorithm.LRU, load_factor=cache, prefetch_pipeline=True
            )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({path: plan}),
        sharders=[sharder],
    )


def shard_model(
    model: nn.Module,
    fused: dict[str, Any],
    world: int,
    device: torch.device,
    cache: float | None = None,
) -> tuple[DistributedModelParallel, Tensor, int]:
    """Shards the table `item` of the model's `embedding` by rows, with its optimizer `fused` into
    the backward pass. `cache`: as of `shard_by_rows`.

    Returns:
        The sharded model; this rank's rows [rows, width], the table itself and not a copy; the
        first of them.
    """
    sharder: ModuleSharder = EmbeddingCollectionSharder(fused_params=fused)  # type: ignore[assignment]
    if not isinstance(model.embedding, EmbeddingCollection):
        from pec import PECEmbeddingCollectionSharder

        sharder = PECEmbeddingCollectionSharder(fused_params=fused)
    sharded = shard_by_rows(model, "embedding", ["item"], sharder, world, device, cache)
    state = sharded.module.embedding.state_dict()
    (weight,) = (state[name] for name in state if name.endswith("embeddings.item.weight"))
    (shard,) = weight.local_shards()
    return sharded, shard.tensor, shard.metadata.shard_offsets[0]


class Arm:
    """One rank of TorchRec at work. `step` trains on the next batch; it is a collective call."""

    def __init__(
        self,
        workload: Workload,
        rank: int,
        world: int,
        pipeline: str,
        deduplicate: bool,
        device: torch.device,
        cache: float | None,
    ) -> None:
        if pipeline not in PIPELINES:
            raise ValueError(f"pipeline {pipeline!r} is not one of {', '.join(PIPELINES)}")
        model = Model(workload, world, deduplicate, pipeline == "pec")
        fused = {
            "optimizer": OPTIMIZERS[workload.row_optimizer],
            "learning_rate": workload.row_learning_rate,
            "eps": workload.row_epsilon,
        }
        self._sharded, self.shard, self.first_row = shard_model(model, fused, world, device, cache)
        self.dense: Dense = self._sharded.module.dense
        self.replicated: DistributedDataParallel = self._sharded._dmp_wrapped_module
        fill_table(workload, self.shard, self.first_row)
        self._feed = _feed(workload, rank, world, deduplicate, device.type == "cuda")
        self.device = device
        self._pipeline = PIPELINES[pipeline](
            self._sharded, make_dense_optimizer(workload, self.dense.parameters()), device
        )

    def progress(self) -> Tensor:
        """Trains on the next batch -> this rank's share of the loss."""
        return self._pipeline.progress(self._feed)

    def step(self) -> float:
        """The loss of this step: the mean over the samples of all ranks."""
        loss = self.progress()
        dist.all_reduce(loss)
        return float(loss)

    def finish(self) -> None:
        """Applies what the pipeline has deferred to its next step."""
        if hasattr(self._pipeline, "apply_deferred"):
            self._pipeline.apply_deferred()

    def close(self) -> None:
        """All ranks leave together: what a pipeline has fetched ahead is still on the wire
        before."""
        if self.device.type == "cpu":
            dist.barrier()


def build(
    workload: Workload,
    rank: int,
    world: int,
    pipeline: str = "base",
    deduplicate: bool = False,
    device: torch.device | str = "cpu",
    cache: float | None = None,
) -> Arm:
    """Needs an initialised default process group of `world` ranks."""
    return Arm(workload, rank, world, pipeline, deduplicate, torch.device(device), cache)
