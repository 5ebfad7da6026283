"""Peak memory of a rank that trains a 2-million-row, 128-wide Adagrad table on 2 ranks.

Two readings: of the whole process, and without what a process takes that has imported torch and
made one step of an optimizer on sixteen numbers (about 300 MiB here, a third of the floor by
itself).

.venv/bin/python benchmarks/bench_memory.py
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "peer")]

from pinned import pinned_ranks  # noqa: E402
from results import claim, write  # noqa: E402
from workload import Workload  # noqa: E402

WORKLOAD = Workload(
    rows=2_000_000, width=128, popularity="unique", row_optimizer="adagrad", steps=8
)


def _resident() -> int:
    text = Path("/proc/self/status").read_text()
    return (
        next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS")) * 1024
    )


def _torch_alone() -> int:
    """What any training process of torch takes: an optimizer's first step imports a good deal of
    it."""
    import torch

    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return _resident()


def measure(rank: int, world: int, workload: Workload) -> dict[str, int]:
    from freescale_arm import build, feed

    from freescale.ledger.peak_memory import measure_peak_memory

    batch = next(feed(workload, rank, world))
    before = _torch_alone()
    arm = build(workload, rank, world)
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


def main() -> None:
    rows = pinned_ranks(2, measure, WORKLOAD)
    claims = []
    for rank, row in enumerate(rows):
        floor = row["shard"] + row["optimizer_state"] + row["batch"]
        row |= {"rank": rank, "floor": floor}
        whole = row["process_peak"] / floor
        own = (row["process_peak"] - row["process_before"]) / floor
        claims.append(
            claim(
                f"rank {rank}: peak memory over shard + state + one batch, whole process",
                1.3,
                whole,
                "x",
                at_least=False,
            )
        )
        claims.append(
            claim(
                f"rank {rank}: the same without what torch takes alone",
                1.3,
                own,
                "x",
                at_least=False,
            )
        )
    write(
        "memory",
        "cpu",
        ".venv/bin/python benchmarks/bench_memory.py",
        rows,
        claims,
        workload=asdict(WORKLOAD),
    )


if __name__ == "__main__":
    main()
