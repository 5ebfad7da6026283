"""Host time of a launch through `launch_kernel`, and through Triton itself."""

from __future__ import annotations

import torch

from freescale.kernels.jit.launch import launch_kernel
from freescale_bench.common.results import spread
from freescale_bench.kernels.measure import Bench, Call

LAUNCHES, TURNS = 200, 15
SIZES = {"SORTED": False, "CHUNK": 1, "STEPS": 1, "UNROLL": 1, "WIDTH": 64, "R": 1, "W": 64}


def measure_launches(bench: Bench) -> dict[str, float]:
    """Updates one row repeatedly, alternating between both ways."""
    from freescale.kernels.row_updates.triton_kernels import sgd_kernel

    weight = torch.zeros(1, 64, device=bench.device)
    rows = torch.zeros(1, dtype=torch.int64, device=bench.device)
    arguments = weight, rows, weight.clone(), None, None, None, 1, 0.0
    options = {**SIZES, "num_warps": 1, "enable_fp_fusion": False}
    ways: tuple[Call, Call] = (
        lambda: launch_kernel(sgd_kernel, (1,), *arguments, **options),
        lambda: sgd_kernel[(1,)](*arguments, **options),
    )
    turns = [[bench.host(launch, LAUNCHES) for launch in ways] for _ in range(TURNS)]
    direct, by_triton = map(spread, zip(*turns, strict=True))
    faster = by_triton["median"] / direct["median"]
    case = "a launch, host time, next to Triton's own"
    bench.add(
        {"group": "launch", "case": case, "ms": direct, "plain_ms": by_triton, "faster": faster}
    )
    return {"launch, times faster than Triton's": faster}
