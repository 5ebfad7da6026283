"""What each rank of the ladder runs. The first arguments of each function are the rank and the
number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import find_partitioner
from freescale_bench.common.arm import Arm
from freescale_bench.common.torchrec import build_torchrec, has_torchrec
from freescale_bench.common.turns import read_peak_memory, say, take_turns, wait_idle
from freescale_bench.common.workload import Workload
from freescale_bench.ladder.rungs import OURS, PERMUTED, SPARSE_DIST, Rung

BASE = "TorchRec TrainPipelineBase"
SEMI_SYNC = "TorchRec TrainPipelineSemiSync"  # trains on stale rows; needs CUDA
PEC = "TorchRec TrainPipelinePEC"  # on CPUs without its CUDA stream calls; TorchRec 1.9
WARM_UP = 2  # steps before the first turn
PIPELINES = {BASE: "base", SPARSE_DIST: "sparse_dist", SEMI_SYNC: "semi_sync", PEC: "pec"}


def build_arm(
    name: str, workload: Workload, rank: int, world: int, device: torch.device | str = "cpu"
) -> Any:
    """Builds an arm: an object with `step`, `begin_step`, `quiet` and a ledger."""
    if name == PERMUTED:
        return Arm(workload, rank, world, "serial", permuted=True)
    if name in OURS:
        rung = OURS[name]
        options: dict[str, Any] = {
            "transport": rung.transport,
            "balance": _make_balancer(workload, rung, device),
            "dense_sums": rung.dense_sums,
        }
        return Arm(workload, rank, world, rung.schedule, device=device, **options)
    return build_torchrec(workload, rank, world, PIPELINES[name], device=device)


def list_peers(device: torch.device) -> list[str]:
    """Lists TorchRec's arms that can run here, with a message if there are none."""
    if not has_torchrec():
        say("TorchRec is not installed here: its arms are left out")
        return []
    return [BASE, SPARSE_DIST, *([SEMI_SYNC] if device.type == "cuda" else [])]


def build_arms(
    names: Sequence[str], build: Callable[[str], Any], device: torch.device
) -> tuple[dict[str, Any], dict[str, int], dict[str, list[float]]]:
    """Builds the arms and trains two steps of each. Returns the arms, what each adds to the
    device's peak memory, and the losses of these steps. A collective."""
    arms, peaks, first, on_gpu = {}, {}, {}, device.type == "cuda"
    for name in names:
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        arms[name] = build(name)
        first[name] = [arms[name].step() for _ in range(WARM_UP)]
        wait_idle(device)
        peaks[name] = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        say(f"{name}: built, first losses {first[name]}")
    return arms, peaks, first


def find_options(name: str, running: Any) -> dict[str, Any]:
    """Returns the options in effect: `auto` is replaced by the ranks' choice."""
    chosen = running.pipeline.schedule.choices.state_dict()
    sums = chosen.get("dense_sums", OURS[name].dense_sums)  # a single rank sums nothing
    return asdict(replace(OURS[name], transport=running.carrier, dense_sums=sums))


def _make_balancer(workload: Workload, rung: Rung, device: torch.device | str) -> Balancer | None:
    """Makes a balancer like the trainer's, with the cost of this model."""
    if rung.balance == "none":
        return None
    each = workload.inner // workload.heads
    sizes: dict[str, Any] = {
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
) -> dict[str, dict[str, Any]]:
    arms = {name: build_arm(name, workload, rank, world) for name in names}
    found = take_turns(arms, repetitions, steps)
    for name in OURS.keys() & arms.keys():
        found[name]["options"] = find_options(name, arms[name])
    return found


def train_alone(rank: int, world: int, workload: Workload, name: str, steps: int) -> dict[str, Any]:
    """Trains one arm alone in this process: losses and peak memory."""
    running = build_arm(name, workload, rank, world)
    losses = [running.step() for _ in range(steps)]
    running.quiet()
    return {"losses": losses, "peak": read_peak_memory()}
