"""Balancing as measured, not predicted: straggler %, peak memory and the balancing's own exposed time, with and without.

    .venv/bin/python benchmarks/bench_balance_measured.py                                   # 2 CPU ranks, each pinned to a core
    torchrun --nproc-per-node 4 benchmarks/bench_balance_measured.py --device cuda          # GPU ranks sharing one GPU through MPS

HSTU (retrieval) on log-normal lengths; the arms `none`, `greedy` and `local` take turns, each with a model of its own, over the
same batches and from the same weights.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from results import claim, write  # noqa: E402

import freescale  # noqa: E402
from freescale.balance.cost import CostModel  # noqa: E402
from freescale.balance.registry import PARTITIONERS  # noqa: E402
from freescale.balance.shuffle import Balancer  # noqa: E402
from freescale.batch import Jagged, SequenceBatch  # noqa: E402
from freescale.models.heads import Retrieval  # noqa: E402
from freescale.models.hstu import HSTU  # noqa: E402
from freescale.observe.collect import Collector  # noqa: E402
from freescale.observe.ledger import Ledger  # noqa: E402
from freescale.transport.collective import Collective  # noqa: E402

ARMS = ("none", "greedy", "local")
SHAPES: dict[str, dict[str, int]] = {
    "cpu": {"samples": 12, "median": 150, "cap": 1500, "width": 64, "layers": 2, "heads": 2, "items": 20_000},
    "cuda": {"samples": 16, "median": 1500, "cap": 12_000, "width": 256, "layers": 4, "heads": 4, "items": 200_000},
}


def batches(shape: dict[str, int], rank: int, steps: int) -> list[SequenceBatch]:
    made = []
    for number in range(steps):
        random = np.random.default_rng((7, rank, number))
        draws = np.exp(random.normal(np.log(shape["median"]), 1.0, shape["samples"]))
        lengths = torch.from_numpy(np.clip(np.rint(draws), 1, shape["cap"]).astype(np.int64))
        tokens = int(lengths.sum())
        ids = [Jagged(torch.from_numpy(random.integers(0, shape["items"], tokens)), lengths) for _ in range(2)]
        made.append(
            SequenceBatch(
                sequences={"history": ids[0], "targets": ids[1]},
                dense={"negatives": torch.from_numpy(random.integers(0, shape["items"], (shape["samples"], 64)))},
                weights={"next_item": lengths.float()},
                keys=torch.arange(shape["samples"]) + 1000 * number + 1_000_000 * rank,
                number=number,
            )
        )
    return made


class Arm:
    def __init__(self, name: str, shape: dict[str, int], device: torch.device, data: list[SequenceBatch]) -> None:
        torch.manual_seed(0)
        self.transport = Collective(device, Ledger(device))
        encoder = HSTU(width=shape["width"], layers=shape["layers"], heads=shape["heads"], max_length=shape["cap"])
        model = Retrieval(encoder, num_items=shape["items"], table_device="meta")
        parallel = freescale.parallelize(
            model, model.features, freescale.RowWiseAdagrad(lr=0.01), transport=self.transport, placement="sharded", init_std=0.1
        )
        width = shape["width"] // shape["heads"]
        sizes = {"width": shape["width"], "layers": shape["layers"], "heads": shape["heads"], "d_qk": width, "d_v": width}
        cost = CostModel.of_hstu(**sizes, negatives=64)
        self.pipeline = freescale.Pipeline(
            parallel,
            torch.optim.AdamW(parallel.dense_parameters(), lr=1e-3),
            precision="bf16" if device.type == "cuda" else "fp32",
            balancer=None if name == "none" else Balancer(PARTITIONERS[name], cost),
        )
        self.steps = self.pipeline.run(data)
        self.peak = 0
        self.losses: list[float] = []

    def step(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.losses.append(next(self.steps).loss)
        if device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())


def measure(rank: int, world: int, device: torch.device, steps: int) -> dict[str, Any] | None:
    shape = SHAPES[device.type]
    data = batches(shape, rank, steps)
    built = {name: Arm(name, shape, device, data) for name in ARMS}
    for _ in range(steps):
        for arm in built.values():
            arm.step(device)
    figures: dict[str, Any] = {}
    for name, arm in built.items():
        transport = arm.transport
        collector = Collector(transport.ledger, rank, world, transport.gather_bytes, None)
        result = collector.close(device)
        peaks = [int(part) for part in transport.gather_bytes(str(arm.peak).encode())]
        if result is not None:
            figures[name] = result | {"gpu_peak_bytes_above_all_arms": peaks, "losses": arm.losses}
    return figures or None


def cpu_rank(rank: int, world: int, steps: int) -> dict[str, Any] | None:
    return measure(rank, world, torch.device("cpu"), steps)


def report(figures: dict[str, Any], world: int, device: str, steps: int, command: str, commit: str | None = None) -> None:
    rows, claims = [], []
    before = figures["none"]
    for name, result in figures.items():
        drift = max(abs(a - b) / abs(b) for a, b in zip(result["losses"], before["losses"], strict=True))
        # Everything that balancing keeps compute from: planning, packing, rebuilding, and its waits (for slower ranks too).
        own = 100 * result["spans_ms"].get("balance", 0.0) / result["step_ms"]["mean"]
        wire = 100 * result["exposed_ms"]["samples"] / result["step_ms"]["mean"]
        rows.append({"arm": name, "ranks": world, "largest_relative_loss_difference_to_none": drift})
        rows[-1] |= {"balancing_percent": own, "balancing_communication_percent": wire}
        rows[-1] |= {key: value for key, value in result.items() if key != "losses"}
        print(
            f"{name:8s} step {result['step_ms']['median']:8.1f} ms  straggler {result['straggler_percent']:5.1f} %  "
            f"imbalance {result['imbalance']:.3f}  balancing {own:.2f} % (communication {wire:.2f} %)  loss differs {drift:.1e}"
        )
        if name != "none":
            claims.append(claim(f"{name}: balancing's own exposed time, of the step", 1.0, own, "%", at_least=False))
    testbed = "h200" if device == "cuda" else "cpu"
    copied = {"commit": commit} if commit else {}
    write(f"balance-measured-{world}ranks", testbed, command, rows, claims, shape=SHAPES[device], steps=steps, **copied)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--commit", help="of the tree that is measured, where it was copied without its history")
    options = parser.parse_args()
    if options.device == "cpu":
        from pinned import pinned_ranks

        figures = pinned_ranks(2, cpu_rank, options.steps)[0]
        report(figures, 2, "cpu", options.steps, f".venv/bin/python benchmarks/bench_balance_measured.py --steps {options.steps}")
        return
    os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"  # NCCL takes several ranks on one GPU if each names a host of its own
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    transport = freescale.connect(torch.device("cuda:0"))
    found = measure(transport.rank, transport.world, transport.device, options.steps)
    if found is not None:
        launch = f"torchrun --nproc-per-node {transport.world} benchmarks/bench_balance_measured.py"
        report(found, transport.world, "cuda", options.steps, f"{launch} --device cuda --steps {options.steps}", options.commit)
    transport.close()


if __name__ == "__main__":
    main()
