"""A table in host memory in FreeScale and in TorchRec, with the same batches and initial rows:
samples per second, and each system's slow-down against its own table on the device.

TorchRec uses FUSED_UVM_CACHING with LRU and its prefetch pipeline; with the table on the device,
TrainPipelineSparseDist. One rank. The shape is bound by the table: one layer of width 128 over
500,000 distinct rows per step, each read once; popular rows occur in many batches. `direct` is made
for such shapes: a kernel reads the missing rows from host memory. Both sides use row-wise Adagrad,
with 4 bytes of state per row. Arms run one after another in separate processes, to free the memory
in between.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale.embedding.host_tables.tiers import Host, parse_bytes
from freescale.ledger.ledger import Ledger
from freescale_bench.common.arm import Arm
from freescale_bench.common.ranks import get_gpu_name, get_gpu_settings, join, start_ranks
from freescale_bench.common.results import (
    Destination,
    Row,
    Target,
    make_claims,
    show_claims,
    spread,
    write,
)
from freescale_bench.common.torchrec import build_torchrec
from freescale_bench.common.turns import read_resident_memory, wait_idle
from freescale_bench.common.workload import Workload
from freescale_bench.host_tables.setting import COUNTERS
from freescale_bench.train.trained import WINDOW

HOST = "freescale host", "freescale host direct"
DIRECT, OTHER = HOST[1], "torchrec uvm caching"
ARMS = ("freescale device", *HOST, "torchrec device", OTHER)
WARMUP = 40  # steps, after which the caches are full
LIMIT = 400.0  # seconds: limit of an arm

TARGETS = [
    Target(f"{HOST[0]}: samples/s over {OTHER}",
          "samples/s with the table in host memory over TorchRec's FUSED_UVM_CACHING", 1.5, "x"),
    Target(f"{DIRECT}: samples/s over {OTHER}",
          "the same with rows read by the GPU (host:...:direct)", 1.5, "x"),
]  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    device: str
    size: str  # rows and row state
    cache: float  # share of the table
    steps: int  # timed
    popularity: str

    def make_workload(self) -> Workload:
        cuda = self.device == "cuda"
        width = 128 if cuda else 16
        shape: dict[str, Any] = {
            "samples": 2500 if cuda else 10,
            "median_length": 200.0 if cuda else 20.0,
            "maximum_length": 200 if cuda else 20,
        }
        return Workload(
            rows=parse_bytes(self.size) // (4 * width + 4),
            width=width,
            sigma=0.0,
            popularity=self.popularity,  # type: ignore[arg-type]
            layers=1,
            inner=width,
            heads=4,
            steps=40,
            row_optimizer="rowwise_adagrad",
            **shape,
        )

    def as_arguments(self) -> list[str]:
        """Returns the command line of this comparison."""
        words = ["torchrec"]
        for name in ("device", "size", "steps", "popularity"):
            words += [f"--{name}", str(getattr(self, name))]
        return [*words, "--cache", str(parse_bytes(self.size) * self.cache)]


def choose_comparison(
    device: str, size: str | None, cache: str | None, steps: int | None, popularity: str
) -> Comparison:
    """Fills in defaults; on a CPU tiny sizes, to try the code."""
    size = size or ("40GB" if device == "cuda" else "2MB")
    share = 0.1 if cache is None else parse_bytes(cache) / parse_bytes(size)
    return Comparison(device, size, share, steps or (60 if device == "cuda" else 20), popularity)


def build_arm(name: str, comparison: Comparison) -> tuple[Callable[[], Tensor], Ledger | None]:
    """Returns the step function of an arm, and its ledger (None for TorchRec)."""
    workload, device = comparison.make_workload(), torch.device(comparison.device)
    system, place = name.split(" ", 1)
    if system == "torchrec":
        join(comparison.device, LIMIT)
        # Unified memory and the prefetch pipeline need CUDA.
        cached = place != "device" and device.type == "cuda"
        pipeline = "prefetch_sparse_dist" if cached else "sparse_dist"
        cache = comparison.cache if cached else None
        peer = build_torchrec(workload, 0, 1, pipeline, device=device, ledger=False, cache=cache)
        return peer.progress, None
    size = int(parse_bytes(comparison.size) * comparison.cache)
    tier = Host(size, direct=place.endswith("direct"))
    arm = Arm(
        workload,
        0,
        1,
        "staged",
        transport="local",
        device=comparison.device,
        placement="sharded" if place == "device" else tier,
        pinned=device.type == "cuda",
    )
    return arm.begin_step, arm.ledger


def measure_arm(name: str, comparison: Comparison) -> Row:
    """Measures an arm in this process, and returns its row."""
    samples, cuda = comparison.make_workload().samples, comparison.device == "cuda"
    device = torch.device(comparison.device)
    begin = time.perf_counter()
    step, ledger = build_arm(name, comparison)
    wait_idle(device)
    built = time.perf_counter() - begin
    losses = [step() for _ in range(WARMUP)]
    wait_idle(device)
    if ledger is not None:
        ledger.drain()
    windows: list[float] = []
    for _ in range(comparison.steps // WINDOW):
        begin = time.perf_counter()
        losses += [step() for _ in range(WINDOW)]
        wait_idle(device)
        windows.append(1e3 * (time.perf_counter() - begin) / WINDOW)
    row: Row = {
        "arm": name,
        "step_ms": spread(windows),
        "samples_per_second": spread([1e3 * samples / ms for ms in windows]),
        "build_s": built,
        "resident_memory_bytes": read_resident_memory(),
        "losses": [float(loss) for loss in losses],
    }
    if cuda:
        row["device_memory_bytes"] = torch.cuda.max_memory_allocated()
    if ledger is not None and (records := ledger.drain()):
        row |= {
            name: statistics.fmean(record["counters"].get(name, 0.0) for record in records)
            for name in COUNTERS
        }
        total: dict[str, float] = {}
        for span, start, end in (each for record in records for each in record["spans"]):
            total[span] = total.get(span, 0.0) + (end - start) / 1e6
        row["spans_ms"] = {span: ms / len(records) for span, ms in total.items()}
    return row


def collect_figures(rows: list[Row]) -> dict[str, float]:
    """Computes the figures of claims, and each system's slow-down."""
    rates = {row["arm"]: row["samples_per_second"]["median"] for row in rows}
    by_arm = {row["arm"]: row for row in rows}
    figures: dict[str, float] = {}
    for name, rate in rates.items():
        device = f"{name.split()[0]} device"
        if name != device and device in rates:
            figures[f"{name}: slow-down"] = rates[device] / rate
    if OTHER in rates:
        for name in (name for name in HOST if name in rates):
            figures[f"{name}: samples/s over {OTHER}"] = rates[name] / rates[OTHER]
    if {DIRECT, OTHER} <= rates.keys():
        pairs = zip(by_arm[DIRECT]["losses"], by_arm[OTHER]["losses"], strict=True)
        figures["largest loss difference"] = max(abs(mine - other) for mine, other in pairs)
    return figures


def compare(comparison: Comparison, arms: list[str], keep: bool, to: Destination) -> int:
    """Runs the arms one after another. Returns the exit status."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arms:
            output = Path(folder) / "row.json"
            words = [*comparison.as_arguments(), "--arm", name, "--output", str(output)]
            status = start_ranks("host_tables", words, 1, comparison.device, LIMIT)
            if status or not output.exists():
                print(f"{name}: exited with status {status}", flush=True)
                continue
            rows.append(json.loads(output.read_text(encoding="utf-8")))
            output.unlink()
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "losses"}), flush=True)
    figures = collect_figures(rows)
    claims = make_claims(TARGETS, figures)
    print(json.dumps(figures))
    if not keep or comparison.device == "cpu":
        show_claims(claims)
        return 0 if len(rows) == len(arms) else 1
    write(
        "host_tables-torchrec",
        get_gpu_name(),
        f"freescale bench host_tables {' '.join(comparison.as_arguments())}",
        rows,
        claims,
        ("torchrec", "fbgemm-gpu"),
        to=to,
        figures=figures,
        shape=asdict(comparison.make_workload()),
        settings=get_gpu_settings(),
    )
    return 0 if len(rows) == len(arms) else 1
