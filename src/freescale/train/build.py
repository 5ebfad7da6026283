"""The parts of a run, from its configuration: data, model, balancing, tables. Every rank builds the
same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import find_partitioner
from freescale.config import RunConfig
from freescale.data.loader import Histories
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.embedding.parallelize import ShardedModel, parallelize
from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU
from freescale.models.segments import SegmentedHSTU
from freescale.pipeline.dense.thresholded import Thresholding
from freescale.segments import Segments
from freescale.train.evaluate import evaluate_ranking, evaluate_retrieval
from freescale.transport.api import Transport


def histories(
    config: RunConfig, path: Path, transport: Transport, part: str = "train"
) -> Histories:
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
        max_length=config.data.max_length
        + (config.data.candidates if model.task == "ranking" else 0),
        dropout=model.dropout,
        position_bias=model.position_bias,
        time_bias=model.time_bias,
        checkpoint=model.recompute,
        **segments,
    )
    sizes: dict[str, Any] = {
        "num_items": num_items,
        "num_actions": num_actions,
        "table_device": "meta",
    }
    if model.task == "ranking":
        return Ranking(encoder, tasks=config.label_names, **sizes)
    return Retrieval(encoder, temperature=model.temperature, **sizes)


def build_balancer(config: RunConfig, device: torch.device) -> Balancer | None:
    """Costs come from the model's shapes. They stay as they are, so that assignments depend on the
    data alone, or are adapted."""
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
    return Balancer(
        partitioner,
        cost,
        config.train.balance_cap,
        adapt=config.train.balance_adapt,
        segments=segments,
    )


def build_reducer(config: RunConfig) -> Thresholding | None:
    """None: the exact sum."""
    eta = config.train.compress_dense
    return None if eta is None else Thresholding(eta, config.train.compress_every)


def build_parallel(config: RunConfig, data: Histories, transport: Transport) -> ShardedModel:
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


def evaluate(
    config: RunConfig, parallel: ShardedModel, path: Path, part: str, baseline: bool = False
) -> dict[str, dict[str, float]]:
    """Metrics of the model on a part, the same on all ranks; with the popularity baseline beside it
    if asked."""
    data = histories(config, path, parallel.transport, part)
    if config.model.task == "ranking":
        return evaluate_ranking(parallel, data, config.label_names)
    popularity = None
    if baseline:
        popularity = histories(config, path, parallel.transport).item_counts()
    return evaluate_retrieval(parallel, data, popularity=popularity)
