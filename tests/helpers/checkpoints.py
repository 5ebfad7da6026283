"""Training of `Clicks` for the tests of checkpoints, and checkpoints of older formats."""

from __future__ import annotations

import json

import torch

import freescale
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from helpers.toys import Clicks, clicks_batch, rank_slice


def build(transport, optimizer="adam", placement="sharded", **model):
    torch.manual_seed(3)
    parallel = freescale.parallelize(
        Clicks(**model),
        Clicks.ids,
        ROW_OPTIMIZERS[optimizer](lr=0.1),
        transport=transport,
        placement=placement,
        init_std=0.3,
    )
    dense = torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2)
    return parallel, dense, freescale.Pipeline(parallel, dense)


def batches(transport, first, last):
    return [
        rank_slice(clicks_batch(9, seed), transport.rank, transport.world)
        for seed in range(first, last)
    ]


def rewrite_as_format_1(path):
    """As it was written before there were checksums."""
    state = json.loads((path / "state.json").read_text())
    known = ("dense", "tables", "placement", "optimizer", "progress", "ranks", "device", "carried")
    (path / "state.json").write_text(
        json.dumps({"format": 1} | {key: state[key] for key in known if key in state})
    )
