"""The staged schedule on GPU ranks that share one GPU through MPS: serial over NCCL, staged and the
stale control over hostwire, in turns.

One row-wise sharded table of 4 million x 128 with Adagrad. Ids are unique in a global batch; 10 %
also occur in the previous batch. Rows pass twelve times through a 128-1280-128 layer in bf16:
compute takes 1.2 to 1.3 times as long as serial's communication, and dense gradients are about 5 %
of the bytes. NCCL runs over loopback sockets here: its speed says nothing about NVLink.
"""

from __future__ import annotations

import gc
from functools import partial

import torch

from freescale.launch.ranks import is_rank
from freescale.pipeline.staged import Staged
from freescale.transport.process_group import ProcessGroupTransport
from freescale_bench.common.arm import Arm
from freescale_bench.common.ranks import (
    gather_json,
    get_gpu_name,
    get_gpu_settings,
    join,
    start_ranks,
)
from freescale_bench.common.results import Destination, Row, at_most, write
from freescale_bench.common.turns import make_rows, time_turns, wait_idle
from freescale_bench.common.workload import Workload
from freescale_bench.staged.stale import no_collisions

COLLISIONS = 0.1
SHAPES = {
    "cuda": Workload(
        rows=4_000_000, samples=128, median_length=414, sigma=0.0, maximum_length=414,
        collisions=COLLISIONS, hidden=(1280,), passes=12, steps=8, row_learning_rate=0.01,
        dense_learning_rate=1e-3,
    ),
    # to try the code
    "cpu": Workload(
        rows=20_000, width=16, samples=12, median_length=50, sigma=0.0, maximum_length=50,
        collisions=COLLISIONS, hidden=(32,), passes=2, steps=8,
    ),
}  # fmt: skip
LIMIT = 600.0  # seconds: limit of a whole run
SECONDS = 120.0  # limit of a collective


def build_arm(name: str, transport: ProcessGroupTransport) -> Arm:
    """Builds an arm: serial goes over NCCL, the others over hostwire. A collective."""
    carrier = "collective" if name == "serial" else "hostwire-tcp"
    schedule = partial(Staged, masks=no_collisions) if name == "stale" else name
    device, rank, world = transport.device, transport.rank, transport.world
    workload = SHAPES[device.type]
    return Arm(workload, rank, world, schedule, carrier, device, dense_sums="collective")


def measure_peak(name: str, transport: ProcessGroupTransport) -> int:
    """Measures the peak memory of an arm alone on the GPU, in bytes: tables, model, steps."""
    if transport.device.type != "cuda":
        return 0
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    arm = build_arm(name, transport)
    for _ in range(8):
        arm.begin_step()
    arm.pipeline.flush()
    wait_idle(transport.device)
    peak = torch.cuda.max_memory_allocated() - before
    if name != "serial":
        arm.transport.close()
    return peak


def measure_arms(transport: ProcessGroupTransport, turns: int, each: int) -> list[Row]:
    """Returns a row per arm, on rank 0."""
    peaks = {name: measure_peak(name, transport) for name in ("serial", "staged")}
    gc.collect()
    arms = {name: build_arm(name, transport) for name in ("serial", "staged", "stale")}
    found = time_turns(arms, transport.device, turns, each)
    everyone = gather_json(transport, {"found": found, "peaks": peaks | {"stale": 0}})
    if transport.rank:
        return []
    on_gpu = transport.device.type == "cuda"
    rows = make_rows(everyone, SHAPES[transport.device.type].samples, on_gpu)
    for row in rows:
        row["losses_equal_serial"] = not row["largest_relative_loss_difference_to_serial"]
    return rows


def report(rows: list[Row], world: int, turns: int, to: Destination | None) -> None:
    """Writes the result; nothing if `to` is None."""
    serial, staged, _ = rows
    # Every wait of the main thread for its lanes counts, communication or not.
    ours = max(staged["exposed_embedding_ms"]["median"], staged["waited_for_lanes_ms"]["median"])
    ratio = 100 * ours / serial["exposed_embedding_ms"]["median"]
    claims = [
        at_most(
            "staged: exposed embedding communication of serial's, 10 % collisions", 12.0, ratio, "%"
        )
    ]
    workload = SHAPES["cuda"]
    tokens = workload.samples * workload.maximum_length
    batch = tokens * (8 + 4 * workload.width)
    peaks = (row["peak_memory_bytes_per_rank"] for row in (serial, staged))
    extra = max(b - a for a, b in zip(*peaks, strict=True)) / batch
    claims.append(
        at_most(
            "staged: peak memory above serial's, in batches of ids and rows", 1.1, extra, "batches"
        )
    )
    if to is None:
        print("CPU times say nothing about a GPU; nothing is written")
        return
    write(
        f"staged-{world}ranks",
        get_gpu_name(),
        f"freescale bench staged --device cuda --nproc {world} --turns {turns}",
        rows,
        claims,
        to=to,
        collisions=COLLISIONS,
        settings=get_gpu_settings(),
    )


def bench_on_gpu(ranks: int, turns: int, each: int, trial: bool, to: Destination) -> int:
    """Starts the ranks, or runs as one of them. Returns the exit status."""
    device = "cpu" if trial else "cuda"
    if not is_rank():
        arguments = ["--device", "cuda", "--turns", str(turns), "--each", str(each)]
        arguments += [*to.as_arguments(), *(["--trial"] if trial else [])]
        return start_ranks("staged", arguments, ranks, device, LIMIT, threads=2)
    transport = join(device, SECONDS)
    rows = measure_arms(transport, turns, each)
    if rows:
        report(rows, transport.world, turns, None if trial else to)
    transport.close()
    return 0
