"""Peak memory of a rank that trains a 2-million-row, 128-wide Adagrad table on 2 ranks; and how far
the staged schedule's peak is above the serial one's.

Two readings of the first: of the whole process, and without what a process takes that has imported
torch and made one step of an optimizer on sixteen numbers (about 300 MiB here, a third of the floor
by itself). Schedules are compared on batches of one size, each in processes of its own with the
same settings of the heap.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from freescale_bench.common.pinned import run_pinned_ranks
from freescale_bench.common.results import Destination, Row, claim, write
from freescale_bench.common.workload import Workload

WORKLOAD = Workload(
    rows=2_000_000, width=128, popularity="unique", row_optimizer="adagrad", steps=8
)

# Histories of one length each: batches of 40 and of 160 MB of ids and rows.
COMPARED = [
    Workload(
        rows=700_000,
        width=128,
        median_length=float(length),
        sigma=0.0,
        maximum_length=length,
        popularity="unique",
        row_optimizer="adagrad",
        steps=8,
    )
    for length in (1200, 4800)
]
SCHEDULES = ("serial", "staged")


def _read_resident() -> int:
    text = Path("/proc/self/status").read_text()
    return (
        next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS")) * 1024
    )


def _measure_torch_alone() -> int:
    """What any training process of torch takes: an optimizer's first step imports a good deal of
    it."""
    import torch

    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return _read_resident()


def measure(
    rank: int, world: int, workload: Workload, schedule: str = "serial", share: bool = False
) -> dict[str, int]:
    """`share`: the heap is set as the staged schedule sets it."""
    from freescale.ledger.collector import measure_peak_memory
    from freescale.pipeline.host_heap import share_heap
    from freescale_bench.common.arm import build, feed

    if share:
        share_heap()
    batch = next(feed(workload, rank, world))
    before = _measure_torch_alone()
    arm = build(workload, rank, world, schedule=schedule)
    for _ in range(workload.steps):
        arm.step()
    arm.close()
    shard = arm.parallel.tables.get_local_state("item")["rows"]
    tokens = batch.values("history").numel()
    return {
        "shard": shard.numel() * shard.element_size(),
        "optimizer_state": shard.numel() * shard.element_size(),
        "batch": tokens * (8 + workload.width * shard.element_size()),
        "process_before": before,
        "process_peak": measure_peak_memory()["host"],
    }


def bench_memory(to: Destination) -> None:
    rows: list[Row] = run_pinned_ranks(2, measure, WORKLOAD)
    claims = []
    for rank, row in enumerate(rows):
        floor = row["shard"] + row["optimizer_state"] + row["batch"]
        row |= {"rank": rank, "floor": floor}
        text = f"rank {rank}: peak memory over shard + state + one batch, whole process"
        claims.append(claim(text, 1.3, row["process_peak"] / floor, "x", at_least=False))
        own = (row["process_peak"] - row["process_before"]) / floor
        text = f"rank {rank}: the same without what torch takes alone"
        claims.append(claim(text, 1.3, own, "x", at_least=False))
    for compared in COMPARED:
        peaks: dict[str, list[int]] = {}
        for schedule in SCHEDULES:
            found = run_pinned_ranks(2, measure, compared, schedule, True)
            peaks[schedule] = [row["process_peak"] for row in found]
            rows += [
                row | {"rank": rank, "schedule": schedule, "length": compared.maximum_length}
                for rank, row in enumerate(found)
            ]
            print(f"{found[0]['batch'] / 1e6:.0f} MB, {schedule}: {peaks[schedule]}", flush=True)
        above = max(after - before for before, after in zip(*peaks.values(), strict=True))
        size = rows[-1]["batch"]
        text = f"staged: peak above serial's, in batches of {size / 1e6:.0f} MB of ids and rows"
        claims.append(claim(text, 1.1, above / size, "batches", at_least=False))
    workload = asdict(WORKLOAD)
    write("memory", "cpu", "freescale bench memory", rows, claims, to=to, workload=workload)
