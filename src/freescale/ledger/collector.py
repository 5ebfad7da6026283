"""Collects the ledgers of all ranks in the run's folder, in bounded memory.

Rank 0 merges the steps that all ranks have finished and writes `ledger.jsonl` (a line per step),
`ledger.json` and `trace.json.gz`.
"""

from __future__ import annotations

import json
import resource
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from freescale.config import TrainConfig
from freescale.ledger.ledger import Ledger
from freescale.ledger.machine import describe_machine, get_versions
from freescale.ledger.merge import merge_step
from freescale.ledger.record import shift_clock
from freescale.ledger.slow_steps import SlowSteps
from freescale.ledger.summary import Summary
from freescale.ledger.trace import make_header, make_step_events, write_trace


def measure_peak_memory(device: torch.device | str = "cpu") -> dict[str, int]:
    """Peak bytes of this process: `host` (resident) and, with a GPU, `gpu` (allocated)."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if torch.device(device).type == "cuda":
        peaks["gpu"] = torch.cuda.max_memory_allocated(device)
    return peaks


class Collector:
    """Gathers the ledgers of all ranks and writes the figures of the run.

    Every rank calls `collect` at the same steps and `close` at the end: both are collectives.
    """

    def __init__(
        self,
        ledger: Ledger,
        rank: int,
        world: int,
        gather: Callable[[bytes], list[bytes]],  # every rank's bytes to all, in their order
        folder: Path | None,  # None keeps the figures in memory
        *,
        # measures the clock offset to rank 0 and its uncertainty, in nanoseconds, of every rank;
        # called now and at the end
        offsets: Callable[[], tuple[list[int], list[int]]] | None = None,
        trace_steps: int = TrainConfig.trace_steps,  # steps that the trace holds from now on
        resumed: bool = False,  # continue with the steps in the folder's `ledger.jsonl`
        restarts: Sequence[Mapping[str, Any]] = (),  # restarts of the run so far, for `ledger.json`
    ) -> None:
        self._ledger, self._rank, self._world = ledger, rank, world
        self._gather, self._folder = gather, folder
        self._restarts = [dict(restart) for restart in restarts]
        self._measure = offsets
        self._offsets, self._residuals = offsets() if offsets else ([0] * world, [0] * world)
        self._drift = [0] * world
        self._queues: list[deque[dict[str, Any]]] = [deque() for _ in range(world)]
        self._trace_steps = trace_steps
        self._trace: list[dict[str, Any]] = []
        self._traced = 0
        self._origin: int | None = None
        self._slow = SlowSteps()
        self.summary = Summary(world)
        if resumed:
            self._read_steps()

    def _read_steps(self) -> None:
        """Adds the steps that `ledger.jsonl` holds to the figures."""
        if self._folder and (self._folder / "ledger.jsonl").exists():
            with open(self._folder / "ledger.jsonl", encoding="utf-8") as file:
                for line in file:
                    self.summary.add(json.loads(line))

    def restart(self) -> None:
        """Continues with the steps in `ledger.jsonl` and drops those after them, which are
        repeated."""
        for queue in self._queues:
            queue.clear()
        self.summary = Summary(self._world)
        self._read_steps()

    def take_slow_steps(self) -> list[dict[str, Any]]:
        """On rank 0: the slowest outlier among the steps collected since the last call."""
        return self._slow.take()

    def collect(self) -> None:
        """Gathers what the ledgers finished since the last call; rank 0 merges and writes it."""
        payload = json.dumps(self._ledger.drain()).encode()
        parts = self._gather(payload)
        if self._rank != 0:
            return
        for queue, part, offset in zip(self._queues, parts, self._offsets, strict=True):
            queue.extend(shift_clock(record, offset) for record in json.loads(part))
        lines: list[str] = []
        while all(self._queues):
            records = [queue.popleft() for queue in self._queues]
            figures = merge_step(records)
            self.summary.add(figures)
            self._slow.add(figures)
            lines.append(json.dumps(figures) + "\n")
            self._add_to_trace(records)
        if lines and self._folder:
            with open(self._folder / "ledger.jsonl", "a", encoding="utf-8") as file:
                file.writelines(lines)

    def _add_to_trace(self, records: Sequence[dict[str, Any]]) -> None:
        if self._traced >= self._trace_steps:
            return
        self._traced += 1
        if self._origin is None:
            self._origin = min(record["begin"] for record in records)
        self._trace += make_step_events(records, self._origin)

    def close(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """Collects what is left and writes the run's figures. Returns them on rank 0, else None."""
        self.collect()
        if self._measure:
            offsets, residuals = self._measure()
            self._drift = [
                after - before for before, after in zip(self._offsets, offsets, strict=True)
            ]
            self._residuals = [max(a, b) for a, b in zip(self._residuals, residuals, strict=True)]
        about = {**describe_machine(), "versions": get_versions("freescale", "triton")}
        mine = [measure_peak_memory(device), about]
        peaks, machines = zip(
            *(json.loads(part) for part in self._gather(json.dumps(mine).encode())), strict=True
        )
        if self._rank != 0:
            return None
        result = self.summary.summarize()
        result["peak_memory_bytes_per_rank"] = list(peaks)
        result["restarts"] = self._restarts
        self._slow.take()
        result["slow_steps"] = self._slow.found
        result["machines"] = _group_machines(machines)
        result["clock"] = {
            "offset_us": [o / 1e3 for o in self._offsets],
            "residual_us": [r / 1e3 for r in self._residuals],
            "drift_us": [d / 1e3 for d in self._drift],
        }
        if self._folder:
            temporary = self._folder / "ledger.json.tmp"
            temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self._folder / "ledger.json")
            write_trace(self._folder / "trace.json.gz", make_header(self._world) + self._trace)
        return result


def _group_machines(machines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lists the different machines, each with its ranks."""
    distinct: list[dict[str, Any]] = []
    for machine in machines:
        if machine not in distinct:
            distinct.append(machine)
    return [
        {**machine, "ranks": [rank for rank, other in enumerate(machines) if other == machine]}
        for machine in distinct
    ]
