"""Times single kernels on one device, and compares them with the device's limits: a copy and a
matrix product, measured first.

Times are medians from device events, with launches queued behind a pause, as in a training step.
`call_ms` is the host time of a call. Rates count each byte that must be read or written once, and
operations in the lower triangle.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale_bench.common.results import spread

Call = Callable[[], Any]
# cpu: only to try the code, in Triton's interpreter.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "samples": 128, "median": 3000, "cap": 21_000,
        "table": 8_000_000, "rows": 1_000_000, "long": [16_384] * 4, "layer": 128, "line": 16,
        "copy": 1 << 32, "matrix": 8192, "width": 512, "heads": 4, "head_widths": (128, 64),
        "wide": 256, "wide_lengths": (4099, 4096),
    },
    "cpu": {
        "samples": 2, "median": 10, "cap": 24,
        "table": 200, "rows": 50, "long": [20], "layer": 2, "line": 2,
        "copy": 1 << 16, "matrix": 64, "width": 64, "heads": 2, "head_widths": (64,),
        "wide": 64, "wide_lengths": (7, 6),
    },
}  # fmt: skip


def make_events(count: int = 2, blocking: bool = False) -> list[torch.cuda.Event]:
    """Creates events with timing."""
    return [
        torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]
        for _ in range(count)
    ]


class Bench:
    """Measures kernels and collects rows. `seen` is called with each new row."""

    def __init__(
        self, device: str, seen: Callable[[dict[str, Any]], None] = lambda row: None
    ) -> None:
        self.device, self.size, self._seen = torch.device(device), SIZES[device], seen
        self.rows: list[dict[str, Any]] = []
        copied = torch.randn(self.size["copy"] // 8, device=device)
        target = torch.empty_like(copied)
        times = self.times(lambda: target.copy_(copied))
        self.bandwidth = 2 * copied.nbytes / spread(times)["median"] / 1e9  # TB/s
        n = self.size["matrix"]
        left, right = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.flops = 2 * n**3 / spread(self.times(lambda: left @ right))["median"] / 1e9  # TFLOP/s

    @property
    def ceilings(self) -> dict[str, float]:
        return {"copy_tb_per_s": self.bandwidth, "bf16_matrix_tflop_per_s": self.flops}

    @property
    def narrow(self) -> torch.dtype:
        """The dtype of activations. The interpreter's matrix product lacks bfloat16."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def times(self, call: Call, repetitions: int = 20, warm: int = 3) -> list[float]:
        """Milliseconds on the device."""
        if self.device.type != "cuda":
            started = time.perf_counter()
            call()
            return [1e3 * (time.perf_counter() - started)]
        for _ in range(warm):
            call()
        pairs = []
        for _ in range(repetitions):
            pair = make_events()
            # 1 ms, during which launches queue up
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            pair[0].record()
            call()
            pair[1].record()
            torch.cuda.synchronize()
            pairs.append(pair)
        return [start.elapsed_time(end) for start, end in pairs]

    def host(self, call: Call, repetitions: int = 20) -> float:
        """Host milliseconds of a call, without waiting for the device."""
        if self.device.type == "cuda":
            call()
            torch.cuda.synchronize()
        else:
            repetitions = 1
        started = time.perf_counter()
        for _ in range(repetitions):
            call()
        return 1e3 * (time.perf_counter() - started) / repetitions

    def measure(
        self,
        group: str,
        case: str,
        ours: Call,
        plain: Call | None = None,
        *,
        gigabytes: float = 0,
        teraflops: float = 0,
    ) -> dict[str, Any]:
        found = spread(self.times(ours))
        row: dict[str, Any] = {
            "group": group,
            "case": case,
            "ms": found,
            # on a CPU a call is all host time, and one call in the interpreter is enough
            "call_ms": self.host(ours, 5) if self.device.type == "cuda" else found["median"],
        }
        median = found["median"]
        if gigabytes:
            row |= {
                "rate": gigabytes / median,
                "unit": "TB/s",
                "ceiling_percent": 100 * gigabytes / median / self.bandwidth,
            }
        if teraflops:
            row |= {
                "rate": 1e3 * teraflops / median,
                "unit": "TFLOP/s",
                "ceiling_percent": 1e5 * teraflops / median / self.flops,
            }
        if plain is not None:
            once = self.times(plain, 1, 1)
            row["plain_ms"] = spread(once if once[0] > 1000 else self.times(plain, 5, 0))
            row["faster"] = row["plain_ms"]["median"] / median
        return self.add(row)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        self.rows.append(row)
        self._seen(row)
        return row

    def draw(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def lengths(self, samples: int, seed: int = 0) -> npt.NDArray[np.int64]:
        """Draws log-normal lengths, capped."""
        drawn = np.random.default_rng(seed).lognormal(np.log(self.size["median"]), 1.0, samples)
        return np.asarray(np.minimum(drawn.astype(np.int64), self.size["cap"]))
