"""TorchRec's sharded model, its row-wise tables updated by fused kernels in the backward pass,
against the same script with freescale.torchrec: optimizers and their defaults map exactly."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

pytest.importorskip("torchrec")

from helpers.torchrec_cases import build_dlrm, dlrm_batch  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: E402
from torchrec.distributed.sharding_plan import (  # noqa: E402
    construct_module_sharding_plan,
    row_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineBase  # noqa: E402
from torchrec.distributed.types import ShardingPlan  # noqa: E402
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward  # noqa: E402
from torchrec.optim.keyed import KeyedOptimizerWrapper  # noqa: E402
from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: E402
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad  # noqa: E402

import freescale  # noqa: E402

PATH = "model.sparse_arch.embedding_bag_collection"
STEPS = 10


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_plan(model) -> ShardingPlan:
    collection = model.get_submodule(PATH)
    tables = {config.name: row_wise() for config in collection.embedding_bag_configs()}
    plan = construct_module_sharding_plan(
        collection,
        tables,
        sharder=EmbeddingBagCollectionSharder(),
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    return ShardingPlan({PATH: plan})


def build(kind, options):
    model = build_dlrm()
    # a copy: TorchRec changes them
    apply_optimizer_in_backward(kind, model.model.sparse_arch.parameters(), dict(options))
    return model


def train_torchrec(kind, options, batches):
    model = build(kind, options)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    sharded = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=make_plan(model),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    for name, value in sharded.state_dict().items():
        local = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
        local.copy_(start[name])
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda p: torch.optim.SGD(p, lr=0.1))
    pipeline = TrainPipelineBase(sharded, optimizer, torch.device("cpu"))
    iterator = iter(batches)
    return [pipeline.progress(iterator)[0].item() for _ in batches]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.3}),
        (torch.optim.Adagrad, {"lr": 0.05}),
        (RowWiseAdagrad, {"lr": 0.05}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_trains_as_fused_kernels_do(process_group, kind, options):
    batches = [dlrm_batch(seed) for seed in range(STEPS)]
    expected = train_torchrec(kind, options, batches)
    model = build(kind, options)
    sharded = freescale.torchrec.parallelize(model, plan=make_plan(model))
    dense = torch.optim.SGD(sharded.dense_parameters(), lr=0.1)
    pipeline = freescale.torchrec.Pipeline(sharded, dense)
    iterator, losses = iter(batches), []
    for _ in batches:
        pipeline.progress(iterator)
        losses.append(pipeline.last.loss)
    assert losses == pytest.approx(expected, abs=1e-6)
