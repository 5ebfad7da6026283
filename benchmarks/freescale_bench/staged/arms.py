"""What each host of the staged benchmark runs. `Network.run` passes the rank and the number of
ranks first."""

from __future__ import annotations

from functools import partial
from typing import Any

from freescale.pipeline.process_memory import share_heap
from freescale.pipeline.staged import Staged
from freescale_bench.common.arm import Arm
from freescale_bench.common.torchrec import build_torchrec
from freescale_bench.common.turns import read_peak_memory, take_turns
from freescale_bench.common.workload import Workload
from freescale_bench.staged.stale import no_collisions

SERIAL, STALE, STAGED = "serial", "stale", "staged"
TORCHREC, DEDUPLICATED = (
    "TorchRec TrainPipelineSparseDist",
    "TorchRec TrainPipelineSparseDist, ids deduplicated by hand",
)


def build_arm(name: str, workload: Workload, rank: int, world: int) -> Any:
    """Builds an arm: an object with `step`, `quiet` and a ledger."""
    if name in (SERIAL, STAGED):
        return Arm(workload, rank, world, name)
    if name == STALE:
        return Arm(workload, rank, world, partial(Staged, masks=no_collisions))
    return build_torchrec(workload, rank, world, "sparse_dist", deduplicate=name == DEDUPLICATED)


def measure(
    rank: int, world: int, workload: Workload, names: list[str], repetitions: int, steps: int
) -> dict[str, dict[str, Any]]:
    return take_turns(
        {name: build_arm(name, workload, rank, world) for name in names}, repetitions, steps
    )


def measure_peak(rank: int, world: int, workload: Workload, name: str) -> int:
    """Peak memory of a process that trains one of our arms. The heap is set as staged sets it:
    otherwise the arms would differ by settings of glibc."""
    share_heap()
    running = build_arm(name, workload, rank, world)
    for _ in range(workload.steps):
        running.step()
    running.quiet()
    return read_peak_memory()
