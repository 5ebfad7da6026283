"""What each host of bench_ladder.py runs. Each function gets rank and number of ranks first (hosts.py calls it so)."""

from __future__ import annotations

import logging
from typing import Any

import torch
from freescale_arm import build
from priority_arms import in_turns, peak
from workload import Workload

from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.registry import PARTITIONERS

BASE, SPARSE_DIST = "TorchRec TrainPipelineBase", "TorchRec TrainPipelineSparseDist"
SEMI_SYNC = "TorchRec TrainPipelineSemiSync"  # trains on stale rows; needs CUDA
_PIPELINES = {BASE: "base", SPARSE_DIST: "sparse_dist", SEMI_SYNC: "semi_sync"}
SERIAL, PERMUTED, FULL = "serial", "serial, samples permuted", "staged + balancing + hostwire"
PARTS = f"{FULL}, dense by parts"
# Each rung adds one technique: schedule, balancing (greedy, its costs corrected by measured times), transport, dense sums over it.
OURS: dict[str, tuple[str, bool, str, str]] = {
    SERIAL: ("serial", False, "collective", "collective"),
    "serial + balancing": ("serial", True, "collective", "collective"),
    "staged": ("staged", False, "collective", "collective"),
    "staged + balancing": ("staged", True, "collective", "collective"),
    FULL: ("staged", True, "hostwire-tcp", "collective"),
    PARTS: ("staged", True, "hostwire-tcp", "parts"),
}


def arm(name: str, workload: Workload, rank: int, world: int, device: torch.device | str = "cpu") -> Any:
    """With `step`, `begin_step`, `quiet` and a ledger."""
    if name == PERMUTED:
        return build(workload, rank, world, "serial", permuted=True)
    if name in OURS:
        schedule, balanced, transport, sums = OURS[name]
        balancer = _balancer(workload) if balanced else None
        return build(workload, rank, world, schedule, transport=transport, device=device, balancer=balancer, dense_sums=sums)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # TorchRec's tracing makes it warn on every start
    import torchrec_arms
    from ledgered import Ledgered

    return Ledgered(torchrec_arms.build(workload, rank, world, _PIPELINES[name], device=device), rank)


def _balancer(workload: Workload) -> Balancer:
    each = workload.inner // workload.heads
    sizes = {
        "width": workload.inner,
        "layers": workload.layers * workload.passes,
        "heads": workload.heads,
        "d_qk": each,
        "d_v": each,
    }
    return Balancer(PARTITIONERS["greedy"], CostModel.of_hstu(**sizes), adapt=True)


def measure(rank: int, world: int, workload: Workload, names: list[str], repetitions: int, steps: int) -> dict[str, dict]:
    return in_turns({name: arm(name, workload, rank, world) for name in names}, repetitions, steps)


def alone(rank: int, world: int, workload: Workload, name: str, steps: int) -> dict[str, Any]:
    """One arm in a process of its own: losses and the process's peak memory."""
    running = arm(name, workload, rank, world)
    losses = [running.step() for _ in range(steps)]
    running.quiet()
    return {"losses": losses, "peak": peak()}
