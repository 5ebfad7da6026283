"""Samples/s of the serial schedule against TorchRec's TrainPipelineBase and TrainPipelineSparseDist
(testbed B).

The same table, batches, dense layers, starting values and update for all arms, in one run: 2 gloo
ranks, each pinned to a core, arms interleaved. Needs TorchRec: run it with the environment that
benchmarks/peer/setup.sh makes.

    bash benchmarks/peer/setup.sh && .venv-peer/bin/python benchmarks/bench_serial.py
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

from freescale.bench.common.pinned import pinned_ranks
from freescale.bench.common.results import claim, spread, write
from freescale.bench.common.workload import Workload

WORKLOADS = {
    "unique ids": Workload(popularity="unique"),
    "hot ids (Zipf 1.05)": Workload(popularity=1.05),
    # Next to no dense work: what the tables and their exchange cost by themselves.
    "unique ids, tables only": Workload(popularity="unique", hidden=()),
    "hot ids, tables only": Workload(popularity=1.05, hidden=()),
}
OURS = "FreeScale serial"
STOCK = ("TorchRec TrainPipelineBase", "TorchRec TrainPipelineSparseDist")


def arms(workload: Workload, rank: int, world: int) -> dict[str, Any]:
    import logging

    # TorchRec's tracing makes it warn on every start
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    import torchrec_arms

    from freescale.bench.common.arm import build

    peers = {"TrainPipelineBase": "base", "TrainPipelineSparseDist": "sparse_dist"}
    built: dict[str, Any] = {
        f"TorchRec {name}": torchrec_arms.build(workload, rank, world, kind)
        for name, kind in peers.items()
    }
    built["TorchRec TrainPipelineSparseDist, enqueue after forward"] = torchrec_arms.build(
        workload, rank, world, "sparse_dist_late"
    )
    for name, kind in peers.items():
        built[f"TorchRec {name}, ids deduplicated by hand"] = torchrec_arms.build(
            workload, rank, world, kind, deduplicate=True
        )
    built[OURS] = build(workload, rank, world)
    return built


def measure(
    rank: int, world: int, workload: Workload, repetitions: int, steps: int
) -> dict[str, dict[str, list[float]]]:
    """Per arm: step times in ms of each repetition (a mean over `steps`), and all losses."""
    import torch.distributed as dist

    built = arms(workload, rank, world)
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2, help="steps of one repetition")
    options = parser.parse_args()
    given = f"--repetitions {options.repetitions} --steps {options.steps}"
    world = 2
    rows, claims = [], []
    for name, workload in WORKLOADS.items():
        ranks = pinned_ranks(world, measure, workload, options.repetitions, options.steps)
        rates: dict[str, dict[str, float]] = {}
        for arm, mine in ranks[0].items():
            # A repetition lasts until its slowest rank is through.
            slowest = [max(times) for times in zip(*(r[arm]["ms"] for r in ranks), strict=True)]
            rates[arm] = spread([workload.samples * world / ms * 1e3 for ms in slowest])
            drift = max(
                abs(a - b) / abs(b)
                for a, b in zip(mine["loss"], ranks[0][STOCK[0]]["loss"], strict=True)
            )
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
        ours = rates[OURS]["median"]
        stock = max(rates[arm]["median"] for arm in STOCK)
        best = max(rate["median"] for arm, rate in rates.items() if arm != OURS)
        claims.append(
            claim(
                f"{name}: samples/s over the better of TorchRec's two pipelines",
                1.0,
                ours / stock,
                "x",
                at_least=True,
            )
        )
        claims.append(
            claim(
                f"{name}: samples/s over the best of all TorchRec arms",
                1.0,
                ours / best,
                "x",
                at_least=True,
            )
        )
    write(
        "serial",
        "cpu",
        (
            "bash benchmarks/peer/setup.sh && .venv-peer/bin/python benchmarks/bench_serial.py "
            f"{given}"
        ),
        rows,
        claims,
        ("torchrec", "fbgemm-gpu-cpu"),
        workloads={name: asdict(workload) for name, workload in WORKLOADS.items()},
        method=(
            f"{world} gloo ranks, each pinned to a core; arms interleaved; "
            f"{options.repetitions} x {options.steps} steps"
        ),
    )


if __name__ == "__main__":
    main()
