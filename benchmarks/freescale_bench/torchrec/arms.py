"""What each rank of the speed benchmark runs: DLRM in FreeScale and in TorchRec's pipeline. The
first arguments of `measure` are the rank and the number of ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import freescale
from freescale.config import TrainConfig
from freescale.ledger.ledger import Ledger
from freescale.torchrec import Pipeline, parallelize
from freescale_bench.common.arm import Running, WaitLedger, open_transport
from freescale_bench.common.torchrec import build_torchrec_dlrm
from freescale_bench.common.turns import time_turns
from freescale_bench.torchrec.dlrm import (
    DENSE_LR,
    ROW_EPSILON,
    SEED,
    Shape,
    build_dlrm,
    list_batches,
)

OURS, TORCHREC = "freescale", "TorchRec TrainPipelineSparseDist"


class Arm(Running):
    """One rank of FreeScale, with the defaults of `freescale.connect` and of the pipeline."""

    def __init__(
        self, shape: Shape, rank: int, world: int, device: torch.device | str = "cpu"
    ) -> None:
        self.ledger = WaitLedger(device) if device == "cpu" else Ledger(device)
        self.transport, self.carrier = open_transport(device, self.ledger, TrainConfig.transport)
        row_optimizer = freescale.RowWiseAdagrad(lr=shape.row_lr, eps=ROW_EPSILON)
        self.sharded = parallelize(
            build_dlrm(shape, "meta"),
            row_optimizer,
            transport=self.transport,
            placement="sharded",
            seed=SEED,
        )
        self.sharded.tables.init_std = dict.fromkeys(self.sharded.tables.specs, shape.deviation)
        dense = torch.optim.SGD(self.sharded.dense_parameters(), lr=DENSE_LR)
        self.pipeline = Pipeline(self.sharded, dense)
        self._steps = self.pipeline.run(itertools.cycle(list_batches(shape, rank, world)))


def build_arm(
    name: str, shape: Shape, rank: int, world: int, device: torch.device | str = "cpu"
) -> Any:
    """Builds an arm: an object with `step`, `begin_step`, `quiet` and a ledger."""
    if name == OURS:
        return Arm(shape, rank, world, device)
    return build_torchrec_dlrm(shape, rank, world, "sparse_dist", device)


def measure(
    rank: int, world: int, shape: Shape, turns: int, each: int, device: str = "cpu"
) -> dict[str, dict[str, Any]]:
    """Measures each arm: step time and processor time by turn, all losses, and the ledger's records
    without each turn's first."""
    arms = {name: build_arm(name, shape, rank, world, device) for name in (OURS, TORCHREC)}
    found = time_turns(arms, arms[OURS].transport.device, turns, each)
    made: dict[str, dict[str, Any]] = {
        name: {"step_ms": of.pop("turns"), **of} for name, of in found.items()
    }
    made[OURS]["transport"] = arms[OURS].carrier
    return made
