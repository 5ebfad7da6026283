"""Measures balancing on real ranks: straggler %, peak memory, balancing's own exposed time, and the
error of the adapted cost.

HSTU (retrieval) on log-normal lengths; the arms (`none`, `greedy`, `local`, and `adapted`: greedy
with --balance-adapt) take turns. Each has its own model, with the same batches and the same initial
weights. On CPUs an arm's peak memory comes from a separate run of that arm alone. On a GPU it is
the memory that the arm keeps between steps plus the most that a step needs on top.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

import freescale
from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import PARTITIONERS
from freescale.batch import Jagged, SequenceBatch
from freescale.launch.ranks import is_rank
from freescale.ledger.collector import Collector
from freescale.ledger.ledger import Ledger
from freescale.models.heads import Retrieval
from freescale.models.hstu import HSTU
from freescale.transport.process_group import ProcessGroupTransport
from freescale_bench.common.hosts import Loopback
from freescale_bench.common.ranks import get_gpu_name, join, start_ranks
from freescale_bench.common.results import Destination, at_most, spread, write
from freescale_bench.common.turns import wait_idle
from freescale_bench.common.workload import draw_lengths

ARMS = ("none", "greedy", "local", "adapted")
EACH = 5  # steps per turn
LIMIT = 600.0  # seconds: limit of a whole run on GPUs
SECONDS = 120.0  # limit of a collective there
LEARNED = 50  # steps after which the adapted cost must predict
SHAPES: dict[str, dict[str, int]] = {
    "cpu": {
        "samples": 12, "median": 150, "cap": 1500, "width": 64, "layers": 2, "heads": 2,
        "items": 20_000,
    },
    "cuda": {
        "samples": 16, "median": 3000, "cap": 21_000, "width": 256, "layers": 4, "heads": 4,
        "items": 20_000,
    },
}  # fmt: skip


def make_batches(shape: dict[str, int], rank: int, steps: int) -> list[SequenceBatch]:
    made = []
    for number in range(steps):
        random = np.random.default_rng((7, rank, number))
        drawn = draw_lengths(random, shape["median"], shape["samples"], shape["cap"])
        lengths = torch.from_numpy(drawn)
        tokens = int(lengths.sum())
        ids = [
            Jagged(torch.from_numpy(random.integers(0, shape["items"], tokens)), lengths)
            for _ in range(2)
        ]
        made.append(
            SequenceBatch(
                sequences={"history": ids[0], "targets": ids[1]},
                dense={
                    "negatives": torch.from_numpy(
                        random.integers(0, shape["items"], (shape["samples"], 64))
                    )
                },
                weights={"next_item": lengths.float()},
                keys=torch.arange(shape["samples"]) + 1000 * number + 1_000_000 * rank,
                number=number,
            )
        )
    return made


class Arm:
    def __init__(
        self, name: str, shape: dict[str, int], device: torch.device, data: list[SequenceBatch]
    ) -> None:
        torch.manual_seed(0)
        self.transport = ProcessGroupTransport(device, Ledger(device))
        sizes: dict[str, Any] = {name: shape[name] for name in ("width", "layers", "heads")}
        encoder = HSTU(
            **sizes,
            max_length=shape["cap"],
            dropout=0.0,
            position_bias=False,
            time_bias=False,
        )
        model = Retrieval(encoder, num_items=shape["items"], table_device="meta")
        parallel = freescale.parallelize(
            model,
            model.features,
            freescale.RowWiseAdagrad(lr=0.01),
            transport=self.transport,
            placement="sharded",
            init_std=0.1,
        )
        width = shape["width"] // shape["heads"]
        cost = CostModel.of_hstu(**sizes, d_qk=width, d_v=width, negatives=64)
        partitioner = PARTITIONERS["greedy" if name == "adapted" else name]
        self.balancer = (
            None if name == "none" else Balancer(partitioner, cost, adapt=name == "adapted")
        )
        self.pipeline = freescale.Pipeline(
            parallel,
            torch.optim.AdamW(parallel.dense_parameters(), lr=1e-3),
            schedule="serial",
            precision="bf16" if device.type == "cuda" else "fp32",
            dense_sums="collective",
            balance=self.balancer,
        )
        self.steps = self.pipeline.run(data)
        # bytes on the GPU: between steps, and the most that a step adds
        self.kept = 0
        self.needed = 0
        self.totals: list[Tensor] = []  # read at the end: reading waits for the device
        # relative errors of predicted compute times, by rank and step, after step LEARNED
        self.errors: list[float] = []

    def step(self, device: torch.device) -> None:
        before = _read_allocated(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.totals.append(next(self.steps).total)
        if device.type == "cuda":
            self.needed = max(self.needed, torch.cuda.max_memory_allocated() - before)
        if self.balancer is not None and len(self.totals) > LEARNED:
            self.errors += self.balancer.errors.tolist()


def _read_allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def measure(
    rank: int, world: int, device: torch.device, steps: int, arms: tuple[str, ...] = ARMS
) -> dict[str, Any] | None:
    shape = SHAPES[device.type]
    data = make_batches(shape, rank, steps)
    built: dict[str, Arm] = {}
    for name in arms:
        before = _read_allocated(device)
        built[name] = Arm(name, shape, device, data)
        built[name].step(device)
        built[name].kept = _read_allocated(device) - before
        built[name].needed = 0
    begin = time.perf_counter()
    for first in range(1, steps, EACH):
        last = min(steps, first + EACH)
        for arm in built.values():
            for _ in range(first, last):
                arm.step(device)
            wait_idle(device)
            # the next arm must not wait for ranks that still work on this one
            arm.transport.gather_bytes(b"")
        if rank == 0:
            print(
                f"{last} of {steps} steps of each arm, {time.perf_counter() - begin:.0f} s",
                flush=True,
            )
    figures: dict[str, Any] = {}
    for name, arm in built.items():
        transport = arm.transport
        assert isinstance(transport.ledger, Ledger)
        collector = Collector(transport.ledger, rank, world, transport.gather_bytes, None)
        result = collector.close(device)
        peaks = [int(part) for part in transport.gather_bytes(str(arm.kept + arm.needed).encode())]
        if result is not None:
            memory = {"gpu_peak_bytes_per_rank": peaks} if device.type == "cuda" else {}
            figures[name] = (
                result
                | memory
                | {"losses": [float(total) for total in arm.totals], "errors": arm.errors}
            )
    return figures or None


def measure_on_cpu(
    rank: int, world: int, steps: int, arms: tuple[str, ...] = ARMS
) -> dict[str, Any] | None:
    return measure(rank, world, torch.device("cpu"), steps, arms)


def report(
    figures: dict[str, Any], world: int, device: str, steps: int, command: str, to: Destination
) -> None:
    rows, claims = [], []
    before = figures["none"]
    for name, result in figures.items():
        drift = max(
            abs(a - b) / abs(b) for a, b in zip(result["losses"], before["losses"], strict=True)
        )
        # All the time that balancing takes from compute: planning, packing, rebuilding, and waits
        # (for slower ranks too). Lengths travel in the message by which ranks agree on a step;
        # the extra time of that message also counts.
        agreeing = max(0.0, result["spans_ms"]["agree"] - before["spans_ms"]["agree"])
        own = 100 * (result["spans_ms"].get("balance", 0.0) + agreeing) / result["step_ms"]["mean"]
        wire = 100 * result["exposed_ms"]["samples"] / result["step_ms"]["mean"]
        rows.append(
            {"arm": name, "ranks": world, "largest_relative_loss_difference_to_none": drift}
        )
        rows[-1] |= {"balancing_percent": own, "balancing_communication_percent": wire}
        rows[-1] |= {key: value for key, value in result.items() if key not in ("losses", "errors")}
        print(
            f"{name:8s} step {result['step_ms']['median']:8.1f} ms  straggler "
            f"{result['straggler_percent']:5.1f} %  "
            f"imbalance {result['imbalance']:.3f}  balancing {own:.2f} % (communication "
            f"{wire:.2f} %)  loss differs {drift:.1e}"
        )
        if result["errors"]:
            rows[-1]["cost_error_percent_after_50_steps"] = spread(
                [100 * error for error in result["errors"]]
            )
        if name == "adapted" and result["errors"]:
            error = rows[-1]["cost_error_percent_after_50_steps"]["median"]
            text = "adapted: predicted against measured time of a rank, after 50 steps, median"
            claims.append(at_most(text, 5.0, error, "%"))
        if name != "none":
            claims.append(
                at_most(f"{name}: balancing's own exposed time, of the step", 1.0, own, "%")
            )
    testbed = get_gpu_name() if device == "cuda" else "cpu"
    write(
        f"balance-measured-{world}ranks",
        testbed,
        command,
        rows,
        claims,
        shape=SHAPES[device],
        to=to,
        steps=steps,
    )


def bench_on_cpu(steps: int, to: Destination) -> None:
    """Measures 2 ranks, each pinned to a core."""
    figures = Loopback(2).run(measure_on_cpu, steps)[0]
    for name in ARMS:
        alone = Loopback(2).run(measure_on_cpu, 12, (name,))[0]
        figures[name]["peak_memory_bytes_per_rank"] = alone[name]["peak_memory_bytes_per_rank"]
    report(figures, 2, "cpu", steps, f"freescale bench balance measured --steps {steps}", to)


def bench_on_gpu(ranks: int, steps: int, to: Destination) -> int:
    """Starts the ranks, or runs as one of them. Returns the exit status."""
    if not is_rank():
        arguments = ["measured", "--device", "cuda", "--steps", str(steps), *to.as_arguments()]
        return start_ranks("balance", arguments, ranks, "cuda", LIMIT, threads=2)
    transport = join("cuda", SECONDS)
    found = measure(transport.rank, transport.world, transport.device, steps)
    if found is not None:
        world = transport.world
        command = f"freescale bench balance measured --device cuda --nproc {world} --steps {steps}"
        report(found, world, "cuda", steps, command, to)
    transport.close()
    return 0
