"""Collects the ledgers of all ranks in the run's folder, in bounded memory.

Rank 0 merges the steps that all ranks have finished and writes `ledger.jsonl` (a line per step),
`ledger.json` and `trace.json.gz`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from freescale.config import TrainConfig
from freescale.ledger.ledger import Ledger
from freescale.ledger.merge import merge_step
from freescale.ledger.record import shift_clock
from freescale.ledger.summary import Summary
from freescale.ledger.trace import make_header, make_step_events, write_trace

_HISTORY = 100  # earlier steps for comparison
_ENOUGH = 10  # steps before the first comparison
_TIMES = 3.0  # a slow step takes this many times the usual time
_MORE_MS = 1000.0  # and at least this much more: short steps vary
_KEPT = 20  # slow steps in ledger.json


class SlowSteps:
    """Finds slow steps, one step at a time."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=_HISTORY)
        self._fresh: list[dict[str, Any]] = []
        self.found: list[dict[str, Any]] = []  # the slowest of the run, in order

    def add(self, figures: Mapping[str, Any]) -> None:
        """Adds the figures of the next step."""
        lasts = figures["step_ms"]
        if len(self._before) >= _ENOUGH:
            usual = statistics.median(self._before)
            if lasts > max(_TIMES * usual, usual + _MORE_MS):
                slow = {"seconds": lasts / 1e3, "usual": usual / 1e3, "why": explain(figures)}
                # steps are counted from 0 here, and from 1 elsewhere
                self._fresh.append({"step": figures["step"] + 1, "slow_step": slow})
        self._before.append(lasts)

    def take(self) -> list[dict[str, Any]]:
        """Returns the slowest found since the last call: one warning is enough."""
        fresh, self._fresh = self._fresh, []
        slowest = sorted([*self.found, *fresh], key=_get_seconds)[-_KEPT:]
        self.found = sorted(slowest, key=lambda entry: int(entry["step"]))
        return [max(fresh, key=_get_seconds)] if fresh else []


def explain(figures: Mapping[str, Any]) -> str:
    """What a step waited for and which rank caused it, from its line of ledger.jsonl."""
    straggler, exposed = figures["straggler_ms"], figures["exposed_ms"]
    ranks = len(straggler)
    busy, late = _find_work(figures["busy_ms"], straggler)
    parts = {
        "straggler": sum(straggler) / max(1, ranks - 1),
        "exposed": sum(exposed.values()),
        "lanes": max(figures["lane_ms"]),
        "work": max((values[late] for values in figures["busy_ms"].values()), default=0.0),
    }
    # Others wait while one works: their wait is what it costs.
    waits = [name for name in parts if name != "work" and parts[name] > figures["step_ms"] / 2]
    largest = max(waits or parts, key=lambda name: parts[name])
    seconds = parts[largest] / 1e3
    if largest == "straggler" and ranks > 1:
        return f"the other ranks waited {seconds:.2f} s for rank {late}{busy}"
    if largest == "exposed":
        kind = max(exposed, key=lambda name: float(exposed[name]))
        worst = figures["exposed_ms_per_rank"].index(max(figures["exposed_ms_per_rank"]))
        return f"{seconds:.2f} s of waiting for {kind} on their way, longest on rank {worst}"
    if largest == "lanes":
        rank = figures["lane_ms"].index(parts["lanes"])
        return f"rank {rank} waited {seconds:.2f} s for its own lanes"
    return f"rank {late} worked{busy}"


def _find_work(busy: Mapping[str, Sequence[float]], straggler: Sequence[float]) -> tuple[str, int]:
    """The longest span of the rank that waited least, as text, and that rank."""
    late = straggler.index(min(straggler))
    if not busy:
        return "", late
    name = max(busy, key=lambda span: busy[span][late])
    return f" ('{name}' for {busy[name][late] / 1e3:.2f} s)", late


def _get_seconds(entry: Mapping[str, Any]) -> float:
    return float(entry["slow_step"]["seconds"])


def describe_machine() -> dict[str, Any]:
    """Returns CPU, cores, memory and GPU of this machine."""
    import torch

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = _find_entry(info, "model name")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = model or _lscpu() or platform.machine()
    return {
        "cpu": cpu,
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "gpu": gpu,
    }


def _lscpu() -> str | None:
    try:
        done = subprocess.run(["lscpu"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return _find_entry(done.stdout, "Model name")


def _find_entry(text: str, name: str) -> str | None:
    lines = (line for line in text.splitlines() if line.startswith(name))
    return next((line.split(":", 1)[1].strip() for line in lines), None)


def get_versions(*packages: str) -> dict[str, str]:
    """Versions of Python, torch (with build, as `2.15.0+cu132`), numpy and installed `packages`."""
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("numpy", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


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
