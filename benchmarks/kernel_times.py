"""Times of single kernels: what `bench_kernels.py` measures with, and in which sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from results import claim, spread
from torch import Tensor

Call = Callable[[], Any]
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "samples": 128, "median": 3000, "cap": 21_000, "worlds": (32, 64, 128, 256, 512), "table": 8_000_000, "rows": 1_000_000,
        "long": [16_384] * 4, "layer": 128, "line": 16, "copy": 1 << 32, "matrix": 8192,
    },
    "cpu": {
        "samples": 6, "median": 20, "cap": 64, "worlds": (2, 4), "table": 200, "rows": 50,
        "long": [40] * 2, "layer": 3, "line": 2, "copy": 1 << 16, "matrix": 64,
    },
}  # fmt: skip


class Bench:
    def __init__(self, device: str) -> None:
        self.device, self.size = torch.device(device), SIZES[device]
        self.rows: list[dict[str, Any]] = []
        self.claims: list[dict[str, Any]] = []
        copied = torch.randn(self.size["copy"] // 8, device=device)
        target = torch.empty_like(copied)
        times = self.times(lambda: target.copy_(copied))
        self.bandwidth = 2 * copied.nbytes / spread(times)["median"] / 1e9  # TB/s
        n = self.size["matrix"]
        left, right = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.flops = 2 * n**3 / spread(self.times(lambda: left @ right))["median"] / 1e9  # TFLOP/s
        print(f"copy {self.bandwidth:.2f} TB/s, bf16 matrix product {self.flops:.0f} TFLOP/s")
        print(f"{'':56s} {'ms':>9s} {'rate':>16s} {'ceiling':>8s} {'plain ms':>9s} {'faster':>7s} {'call ms':>8s}")

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
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(2_000_000)  # 1 ms: the launches queue up behind it
            pair[0].record()
            call()
            pair[1].record()
            torch.cuda.synchronize()
            pairs.append(pair)
        return [start.elapsed_time(end) for start, end in pairs]

    def host(self, call: Call, repetitions: int = 20) -> float:
        """Milliseconds that a call keeps the host, nothing waited for."""
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repetitions):
            call()
        return 1e3 * (time.perf_counter() - started) / repetitions

    def measure(
        self, group: str, case: str, ours: Call, plain: Call | None = None, *, gigabytes: float = 0, teraflops: float = 0
    ) -> dict[str, Any]:
        found = spread(self.times(ours))
        row: dict[str, Any] = {"group": group, "case": case, "ms": found, "call_ms": self.host(ours, 5)}
        median = found["median"]
        if gigabytes:
            row |= {"rate": gigabytes / median, "unit": "TB/s", "ceiling_percent": 100 * gigabytes / median / self.bandwidth}
        if teraflops:
            row |= {"rate": 1e3 * teraflops / median, "unit": "TFLOP/s", "ceiling_percent": 1e5 * teraflops / median / self.flops}
        if plain is not None:
            row["plain_ms"] = spread(self.times(plain, 5, 1))
            row["faster"] = row["plain_ms"]["median"] / median
        self.rows.append(row)
        reference = f"{row['plain_ms']['median']:9.3f} {row['faster']:6.1f}x" if plain is not None else " " * 17
        rate = f"{row['rate']:8.2f} {row['unit']:7s} {row['ceiling_percent']:6.1f} %" if "rate" in row else " " * 25
        print(f"{group + ': ' + case:56s} {median:9.4f} {rate} {reference} {row['call_ms']:8.3f}", flush=True)
        return row

    def claim(self, text: str, asked: float, measured: float, unit: str, *, at_least: bool = True) -> None:
        self.claims.append(claim(text, asked, measured, unit, at_least=at_least))

    def draw(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def lengths(self, samples: int, seed: int = 0, cap: int | None = None) -> np.ndarray:
        cap = cap or self.size["cap"]
        drawn = np.random.default_rng(seed).lognormal(np.log(self.size["median"]), 1.0, samples)
        return np.minimum(drawn.astype(np.int64), cap)


def in_turn(calls: Sequence[Call]) -> Call:
    """One call after another, so that each finds its inputs in memory and not in the cache."""
    state = [0]

    def call() -> None:
        state[0] = (state[0] + 1) % len(calls)
        calls[state[0]]()

    return call
