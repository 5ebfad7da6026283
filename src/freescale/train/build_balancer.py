"""Builds the balancer of a run from its configuration and the shapes of its model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import find_partitioner
from freescale.config import RunConfig
from freescale.data.batches.negatives import choose_negatives
from freescale.models.dlrm import DlrmRanking

# Cost of moving samples, however few: about 2 ms of one CPU core, in floating-point operations.
_PRICE_OF_MOVES = 4e7


def build_balancer(
    config: RunConfig, device: torch.device, prefix: int = 0, inputs: int = 0
) -> Balancer | None:
    """Builds the balancer; None without balancing. Costs follow from the model's shapes, the tokens
    of a `prefix` and the weights of networks on `inputs`. Unless they adapt, assignments depend on
    the data alone."""
    if config.train.balance == "none":
        return None
    model = config.model
    negatives = choose_negatives(config.data.negatives, config.data.negatives_per)
    shape: dict[str, int] = {
        "width": model.width,
        "layers": model.layers,
        "negatives": negatives if model.task == "retrieval" else 0,
        "tasks": len(config.label_names),
    }
    head = model.width // model.heads
    cost = (
        CostModel.of_sasrec(**shape, hidden=model.hidden)
        if model.encoder == "sasrec"
        else CostModel.of_hstu(
            **shape,
            heads=model.heads,
            d_qk=head,
            d_v=head,
            inputs=inputs,
            wide=model.head == "dlrm",
        )
    )
    cost = replace(cost, visible=model.visible)
    partitioner = find_partitioner(config.train.balance, device)
    return Balancer(
        partitioner,
        cost.with_prefix(prefix) if prefix else cost,
        config.train.balance_cap,
        adapt=config.train.balance_adapt,
        least_gain=_PRICE_OF_MOVES if device.type == "cpu" else 0.0,
        split_histories=config.train.split_histories,
    )


def count_extra_work(module: nn.Module) -> tuple[int, int]:
    """What a sample costs beyond its events and layers: tokens before its history, and weights that
    make a token of an event."""
    if isinstance(module, DlrmRanking):
        return module.encoder.context, module.input_weights
    return len(getattr(module, "user_places", ())), 0
