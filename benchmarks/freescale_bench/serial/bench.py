"""Samples/s of the serial schedule against TorchRec's TrainPipelineBase and TrainPipelineSparseDist
(testbed B).

The same table, batches, dense layers, starting values and update for all arms, in one run: 2 gloo
ranks, each pinned to a core, arms interleaved.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from freescale_bench.common.arm import build
from freescale_bench.common.pinned import run_pinned_ranks
from freescale_bench.common.results import Claim, Destination, claim, write
from freescale_bench.common.spread import spread
from freescale_bench.common.torchrec import build_torchrec, has_torchrec
from freescale_bench.common.workload import Workload

WORKLOADS = {
    "unique ids": Workload(popularity="unique"),
    "hot ids (Zipf 1.05)": Workload(popularity=1.05),
    # Next to no dense work: what the tables and their exchange cost by themselves.
    "unique ids, tables only": Workload(popularity="unique", hidden=()),
    "hot ids, tables only": Workload(popularity=1.05, hidden=()),
}
OURS = "FreeScale serial"
STOCK = ("TorchRec TrainPipelineBase", "TorchRec TrainPipelineSparseDist")


def build_arms(workload: Workload, rank: int, world: int) -> dict[str, Any]:
    """By name. TorchRec's where it is installed; TrainPipelineBase, the reference, comes first."""
    built: dict[str, Any] = {}

    def add(name: str, pipeline: str, deduplicate: bool = False) -> None:
        built[name] = build_torchrec(
            workload, rank, world, pipeline, deduplicate=deduplicate, ledger=False
        )

    if has_torchrec():
        peers = {STOCK[0]: "base", STOCK[1]: "sparse_dist"}
        for name, pipeline in peers.items():
            add(name, pipeline)
        add(f"{STOCK[1]}, enqueue after forward", "sparse_dist_late")
        for name, pipeline in peers.items():
            add(f"{name}, ids deduplicated by hand", pipeline, deduplicate=True)
    built[OURS] = build(workload, rank, world)
    return built


def measure(
    rank: int, world: int, workload: Workload, repetitions: int, steps: int
) -> dict[str, dict[str, list[float]]]:
    """Per arm: step times in ms of each repetition (a mean over `steps`), and all losses."""
    import torch.distributed as dist

    built = build_arms(workload, rank, world)
    measured: dict[str, dict[str, list[float]]] = {name: {"ms": [], "loss": []} for name in built}
    for repetition in range(repetitions + 1):
        for name, arm in built.items():
            dist.barrier()
            begin = time.perf_counter()
            losses = [arm.step() for _ in range(steps)]
            elapsed = (time.perf_counter() - begin) * 1e3 / steps
            measured[name]["loss"] += losses
            if repetition:  # the first is warm-up
                measured[name]["ms"].append(elapsed)
    for arm in built.values():
        arm.close()
    return measured


def make_claims(workload: str, rates: dict[str, float]) -> list[Claim]:
    """`rates`: median samples/s by arm."""
    others = [arm for arm in rates if arm != OURS]
    return [
        claim(
            f"{workload}: samples/s over {text}",
            1.0,
            rates[OURS] / max(rates[arm] for arm in arms),
            "x",
            at_least=True,
        )
        for text, arms in (
            ("the better of TorchRec's two pipelines", STOCK),
            ("the best of all TorchRec arms", others),
        )
        if others
    ]


def bench_serial(repetitions: int, steps: int, to: Destination) -> None:
    world = 2
    rows, claims = [], []
    for name, workload in WORKLOADS.items():
        ranks = run_pinned_ranks(world, measure, workload, repetitions, steps)
        rates: dict[str, dict[str, float]] = {}
        reference = next(iter(ranks[0].values()))["loss"]  # TrainPipelineBase, where it is there
        for arm, mine in ranks[0].items():
            # A repetition lasts until its slowest rank is through.
            slowest = [max(times) for times in zip(*(r[arm]["ms"] for r in ranks), strict=True)]
            rates[arm] = spread([workload.samples * world / ms * 1e3 for ms in slowest])
            drift = max(abs(a - b) / abs(b) for a, b in zip(mine["loss"], reference, strict=True))
            rows.append(
                {
                    "workload": name,
                    "arm": arm,
                    "samples_per_second": rates[arm],
                    "step_ms": spread(slowest),
                }
                | {
                    "last_loss": mine["loss"][-1],
                    "largest_relative_loss_difference_to_TrainPipelineBase": drift,
                }
            )
            step = spread(slowest)["median"]
            print(
                f"{name:24s} {arm:60s} {rates[arm]['median']:8.1f} samples/s {step:8.1f} ms  "
                f"loss differs {drift:.1e}"
            )
        claims += make_claims(name, {arm: rate["median"] for arm, rate in rates.items()})
    write(
        "serial",
        "cpu",
        f"freescale bench serial --repetitions {repetitions} --steps {steps}",
        rows,
        claims,
        ("torchrec", "fbgemm-gpu-cpu"),
        to=to,
        workloads={name: asdict(workload) for name, workload in WORKLOADS.items()},
        method=(
            f"{world} gloo ranks, each pinned to a core; arms interleaved; "
            f"{repetitions} x {steps} steps"
        ),
    )
