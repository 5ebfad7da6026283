"""What each host of bench_priority.py runs. Each function gets rank and number of ranks first
(hosts.py calls it so)."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from freescale_arm import build
from stale import no_collisions
from workload import Workload

from freescale.pipeline.staged import Staged

SERIAL, STALE, STAGED = "serial", "stale", "staged"
TORCHREC, DEDUPLICATED = (
    "TorchRec TrainPipelineSparseDist",
    "TorchRec TrainPipelineSparseDist, ids deduplicated by hand",
)


def arm(name: str, workload: Workload, rank: int, world: int) -> Any:
    """With `step`, `quiet` and a ledger."""
    if name in (SERIAL, STAGED):
        return build(workload, rank, world, name)
    if name == STALE:
        return build(workload, rank, world, partial(Staged, masks=no_collisions))
    # TorchRec's tracing makes it warn on every start
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    import torchrec_arms
    from ledgered import Ledgered

    return Ledgered(
        torchrec_arms.build(workload, rank, world, "sparse_dist", deduplicate=name == DEDUPLICATED),
        rank,
    )


def measure(
    rank: int, world: int, workload: Workload, names: list[str], repetitions: int, steps: int
) -> dict[str, dict]:
    return in_turns({name: arm(name, workload, rank, world) for name in names}, repetitions, steps)


def in_turns(arms: dict[str, Any], repetitions: int, steps: int) -> dict[str, dict]:
    """Arms in turn, `steps` steps each time, the first time not counted. The first step of a turn
    is not counted either: what it would have to wait for was done before, while the arms changed.
    Per arm: all losses, and the ledger's records of the others."""
    names = list(arms)
    measured: dict[str, dict] = {name: {"losses": [], "records": []} for name in names}
    for repetition in range(repetitions + 1):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            measured[name]["losses"] += [arms[name].step() for _ in range(steps)]
            arms[name].quiet()
            records = arms[name].ledger.drain()
            if repetition:
                measured[name]["records"] += records[1:]
    dist.barrier()
    return measured


def train(
    rank: int, world: int, workload: Workload, names: list[str], steps: int
) -> dict[str, dict[str, Any]]:
    """Arms of ours one after another: losses, a checksum of what was trained, and the peak memory
    of the process until then."""
    trained = {}
    for name in names:
        running = arm(name, workload, rank, world)
        losses = [running.step() for _ in range(steps)]
        running.quiet()
        highest = peak()
        trained[name] = {"losses": losses, "checksum": running.checksum(), "peak": highest}
    return trained


def peak() -> int:
    """Largest resident memory of this process so far, in bytes."""
    text = Path("/proc/self/status").read_text()
    return (
        next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM")) * 1024
    )
