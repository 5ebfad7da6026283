"""Times the steps of an arm that trains the shared workload (common/workload.py)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from freescale.ledger.ledger import Ledger
from freescale_bench.common.results import Row
from freescale_bench.common.spread import spread
from freescale_bench.common.turns import read_resident_memory
from freescale_bench.host_tables.setting import WINDOW

COUNTERS = ("cache_wanted", "cache_missed", "cache_bytes_up", "cache_bytes_down")


def time_arm(
    build: Callable[[], tuple[Callable[[], Tensor], Ledger | None]],
    samples: int,
    warmup: int,
    steps: int,
    device: str,
) -> Row:
    """The figures of an arm.

    Args:
        build: makes the arm; returns what trains a step and returns its loss, and the ledger.
        samples: of a step.
        warmup: steps before those that are timed.
        steps: that are timed.
        device: cuda or cpu.
    """

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    begin = time.perf_counter()
    step, ledger = build()
    wait()
    built = time.perf_counter() - begin
    losses = [step() for _ in range(warmup)]
    wait()
    if ledger is not None:
        ledger.drain()
    windows: list[float] = []
    for _ in range(steps // WINDOW):
        begin = time.perf_counter()
        losses += [step() for _ in range(WINDOW)]
        wait()
        windows.append(1e3 * (time.perf_counter() - begin) / WINDOW)
    row: Row = {
        "step_ms": spread(windows),
        "samples_per_second": spread([1e3 * samples / ms for ms in windows]),
        "build_s": built,
        "resident_memory_bytes": read_resident_memory(),
        "losses": [float(loss) for loss in losses],
    }
    if device == "cuda":
        row["device_memory_bytes"] = torch.cuda.max_memory_allocated()
    if ledger is not None and (records := ledger.drain()):
        row |= {
            name: statistics.fmean(record["counters"].get(name, 0.0) for record in records)
            for name in COUNTERS
        }
        row["spans_ms"] = _average_spans(records)
    return row


def _average_spans(records: list[dict[str, Any]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for record in records:
        for name, start, end in record["spans"]:
            total[name] = total.get(name, 0.0) + (end - start) / 1e6
    return {name: span / len(records) for name, span in total.items()}
