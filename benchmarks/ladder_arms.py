"""What each host of bench_ladder.py runs. Each function gets rank and number of ranks first
(hosts.py calls it so)."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import Any

import torch
from freescale_arm import build
from priority_arms import in_turns, peak
from rungs import OURS, PERMUTED, Rung
from workload import Workload

from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import find_partitioner

BASE, SPARSE_DIST = "TorchRec TrainPipelineBase", "TorchRec TrainPipelineSparseDist"
SEMI_SYNC = "TorchRec TrainPipelineSemiSync"  # trains on stale rows; needs CUDA
_PIPELINES = {BASE: "base", SPARSE_DIST: "sparse_dist", SEMI_SYNC: "semi_sync"}


def arm(
    name: str, workload: Workload, rank: int, world: int, device: torch.device | str = "cpu"
) -> Any:
    """With `step`, `begin_step`, `quiet` and a ledger."""
    if name == PERMUTED:
        return build(workload, rank, world, "serial", permuted=True)
    if name in OURS:
        rung = OURS[name]
        options = {
            "transport": rung.transport,
            "balance": _balancer(workload, rung, device),
            "dense_sums": rung.dense_sums,
        }
        return build(workload, rank, world, rung.schedule, device=device, **options)
    # TorchRec's tracing makes it warn on every start
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    import torchrec_arms
    from ledgered import Ledgered

    return Ledgered(
        torchrec_arms.build(workload, rank, world, _PIPELINES[name], device=device), rank
    )


def taken(name: str, running: Any) -> dict[str, Any]:
    """The rung's options as they turned out: `auto` is what the ranks agreed on."""
    return asdict(replace(OURS[name], transport=running.carrier))


def _balancer(workload: Workload, rung: Rung, device: torch.device | str) -> Balancer | None:
    """As the trainer makes it; costs are of this model."""
    if rung.balance == "none":
        return None
    each = workload.inner // workload.heads
    sizes = {
        "width": workload.inner,
        "layers": workload.layers * workload.passes,
        "heads": workload.heads,
        "d_qk": each,
        "d_v": each,
    }
    return Balancer(
        find_partitioner(rung.balance, device), CostModel.of_hstu(**sizes), adapt=rung.balance_adapt
    )


def measure(
    rank: int, world: int, workload: Workload, names: list[str], repetitions: int, steps: int
) -> dict[str, dict]:
    arms = {name: arm(name, workload, rank, world) for name in names}
    found = in_turns(arms, repetitions, steps)
    for name in OURS.keys() & arms.keys():
        found[name]["options"] = taken(name, arms[name])
    return found


def alone(rank: int, world: int, workload: Workload, name: str, steps: int) -> dict[str, Any]:
    """One arm in a process of its own: losses and the process's peak memory."""
    running = arm(name, workload, rank, world)
    losses = [running.step() for _ in range(steps)]
    running.quiet()
    return {"losses": losses, "peak": peak()}
