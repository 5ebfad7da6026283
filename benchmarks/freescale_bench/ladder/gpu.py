"""The ladder on GPU ranks that share one GPU through MPS: TorchRec's pipelines, its stale SemiSync
among them, then FreeScale with one technique more on each rung, and with the defaults of `freescale
train`, on the same HSTU, data and seeds.

TorchRec needs its CUDA kernels: torchrec 1.6.1 with fbgemm-gpu 1.6.0 on torch 2.11. Without them
its arms are left out, with a message. A turn is a few steps that start and end with an idle device;
step time is the turn's time over its steps, in every arm. Exposed time comes from our ledger, for
our arms only. NCCL runs over loopback sockets here: its speed says nothing about NVLink. Lanes
without hostwire use pinned memory and gloo.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

from freescale.launch.ranks import is_rank
from freescale_bench.common.ranks import (
    gather_json,
    get_gpu_name,
    get_gpu_settings,
    join,
    start_ranks,
)
from freescale_bench.common.results import Claim, Destination, Row, at_least, write
from freescale_bench.common.turns import make_rows, time_turns
from freescale_bench.common.workload import Workload
from freescale_bench.ladder.arms import SEMI_SYNC, build_arm, build_arms, find_options, list_peers
from freescale_bench.ladder.rungs import OURS, PARTITIONED, SERIAL, SPARSE_DIST

# The paper's shape divided by 3: log-normal histories of median 3,000 and at most 21,000 items, 12
# % collisions.
SHAPES = {
    "cuda": Workload(
        rows=4_000_000, width=128, samples=32, median_length=1000, sigma=1.0, maximum_length=7000,
        collisions=0.12, layers=5, inner=256, heads=2, steps=8, dense_learning_rate=1e-4,
        row_learning_rate=0.01,
    ),
    "cpu": Workload(
        rows=20_000, width=16, samples=4, median_length=50, sigma=1.0, maximum_length=200,
        collisions=0.12, layers=1, inner=32, heads=2, steps=8,
    ),
}  # fmt: skip
LIMIT = 600.0  # seconds: limit of a whole run


def make_claims(rows: list[Row]) -> list[Claim]:
    by = {row["arm"]: row for row in rows}
    rate = {name: row["samples_per_second"]["median"] for name, row in by.items()}
    below = {
        key: 100 * (1 - by[PARTITIONED][key]["median"] / by[SERIAL][key]["median"])
        for key in ("exposed_embedding_ms", "exposed_all_ms")
    }
    text = "full system: exposed communication below serial's over NCCL"
    found = [
        at_least(f"{text}, ids, rows and gradients", 90.0, below["exposed_embedding_ms"], "%"),
        at_least(f"{text}, all kinds", 90.0, below["exposed_all_ms"], "%"),
        at_least(
            "full system: samples/s over serial's", 1.4, rate[PARTITIONED] / rate[SERIAL], "times"
        ),
    ]
    for arm, whose, least in (
        (SPARSE_DIST, "TorchRec SparseDist's", 1.3),
        (SEMI_SYNC, "TorchRec SemiSync's (stale rows)", 1.0),
    ):
        if arm in rate:
            value = rate[PARTITIONED] / rate[arm]
            text = f"full system: samples/s over {whose}"
            found.append(at_least(text, least, value, "times"))
    return found


def bench_on_gpu(ranks: int, turns: int, each: int, trial: bool, to: Destination) -> int:
    """Starts the ranks, or runs as one of them. Returns the exit status."""
    device = "cpu" if trial else "cuda"
    if not is_rank():
        arguments = ["--device", "cuda", "--turns", str(turns), "--each", str(each)]
        arguments += [*to.as_arguments(), *(["--trial"] if trial else [])]
        return start_ranks("ladder", arguments, ranks, device, LIMIT, threads=2)
    _run_rank(device, turns, each, to)
    return 0


def _run_rank(device_type: str, turns: int, each: int, to: Destination) -> None:
    collective = join(device_type, 120.0)
    device = collective.device
    workload = SHAPES[device.type]
    rank, world = collective.rank, collective.world
    build = partial(build_arm, workload=workload, rank=rank, world=world, device=device)
    arms, peaks, _ = build_arms([*list_peers(device), *OURS], build, device)
    found: dict[str, Any] = {"found": time_turns(arms, device, turns, each), "peaks": peaks}
    found["options"] = {name: find_options(name, arms[name]) for name in OURS}
    everyone = gather_json(collective, found)
    if collective.rank == 0:
        rows = make_rows(everyone, workload.samples, device.type == "cuda")
        claims = make_claims(rows)
        if device.type == "cuda":
            write(
                f"ladder-paper-{collective.world}ranks",
                get_gpu_name(),
                f"freescale bench ladder --device cuda --nproc {collective.world} --turns {turns}",
                rows,
                claims,
                ("torchrec", "fbgemm-gpu", "triton"),
                to=to,
                workload=asdict(workload),
                settings=get_gpu_settings(),
            )
        else:
            print("CPU times say nothing about a GPU; nothing is written")
    collective.gather_bytes(b"")
    sys.stdout.flush()
    os._exit(0)  # several of NCCL's groups, on one GPU, would wait for each other
