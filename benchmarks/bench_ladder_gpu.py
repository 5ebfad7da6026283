"""The ladder on GPU ranks that share one GPU through MPS: TorchRec's pipelines, its stale SemiSync
among them, then FreeScale with one technique more on each rung, and with the defaults of `freescale
train`, on the same HSTU, data and seeds.

    freescale bench ladder --device cuda --nproc 4
    python3 benchmarks/bench_ladder_gpu.py --nproc 4 --commit HASH      # starts its ranks, and MPS, by itself

TorchRec needs its CUDA kernels: torchrec 1.6.1 with fbgemm-gpu 1.6.0 beside torch 2.11; without
them its arms are left out, and that is said. A turn of an arm is a few steps between two moments at
which the device is idle; a step's time is the turn's over its steps, for every arm alike. What is
exposed comes from our ledger: of our arms only. NCCL runs over loopback sockets here: its speed
says nothing about NVLink. Lanes that do not go over hostwire go through pinned memory and gloo.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parent / "peer"),
    str(Path(__file__).parent.parent / "src"),
]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ladder_arms import BASE, SEMI_SYNC, SPARSE_DIST, arm, taken  # noqa: E402
from results import claim, get_gpu_name, get_gpu_settings, spread, write  # noqa: E402
from rungs import OURS, PARTS, SERIAL  # noqa: E402
from workload import Workload  # noqa: E402

from freescale.bench.ranks import divided_gpu, is_rank, join, queues  # noqa: E402
from freescale.ledger.merge import merge_step  # noqa: E402

# The paper's shape divided by 3: log-normal histories of median 3,000 and at most 21,000 items, 12
# % collisions.
SHAPES = {
    "cuda": Workload(
        rows=4_000_000, width=128, samples=32, median_length=1000, sigma=1.0, maximum_length=7000, collisions=0.12, layers=5,
        inner=256, heads=2, steps=8, dense_learning_rate=1e-4, row_learning_rate=0.01,
    ),
    "cpu": Workload(
        rows=20_000, width=16, samples=4, median_length=50, sigma=1.0, maximum_length=200, collisions=0.12, layers=1,
        inner=32, heads=2, steps=8,
    ),
}  # fmt: skip
EMBEDDING = ("ids", "rows", "gradients")


def idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def built(
    names: list[str], workload: Workload, device: torch.device
) -> tuple[dict[str, Any], dict[str, int]]:
    """The arms, after two steps each, and what each adds to the device's peak."""
    rank, world = dist.get_rank(), dist.get_world_size()
    arms, peaks = {}, {}
    for name in names:
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        arms[name] = arm(name, workload, rank, world, device)
        for _ in range(2):
            arms[name].step()
        idle(device)
        peaks[name] = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
        _say(f"{name}: built")
    return arms, peaks


def measure(
    arms: dict[str, Any], device: torch.device, turns: int, each: int
) -> dict[str, dict[str, list]]:
    found: dict[str, dict[str, list]] = {
        name: {"turns": [], "losses": [], "records": []} for name in arms
    }
    names = list(arms)
    for turn in range(turns + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            idle(device)
            dist.barrier(group=_control())
            begin = time.perf_counter()
            losses = [arms[name].begin_step() for _ in range(each)]
            idle(device)
            took = time.perf_counter() - begin
            arms[name].quiet()
            idle(device)
            records = arms[name].ledger.drain() if name in OURS else []
            found[name]["losses"] += [float(loss) for loss in losses]
            if turn:  # the first warms up
                found[name]["turns"].append(1e3 * took / each)
                found[name]["records"] += records[1:]
        _say(f"{turn} of {turns} turns of each arm")
    return found


_groups: list[Any] = []


def _control() -> Any:
    if not _groups:
        _groups.append(dist.new_group(backend="gloo"))
    return _groups[0]


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def rows_of(everyone: list[dict[str, Any]], workload: Workload) -> list[dict[str, Any]]:
    """everyone: what each rank found."""
    rows = []
    for name in everyone[0]["found"]:
        ranks = [rank["found"][name] for rank in everyone]
        step = [max(times) for times in zip(*(rank["turns"] for rank in ranks), strict=True)]
        row: dict[str, Any] = {
            "arm": name,
            "ranks": len(everyone),
            "step_ms": spread(step),
            "samples_per_second": spread(
                [1e3 * workload.samples * len(everyone) / ms for ms in step]
            ),
            "peak_memory_bytes_per_rank": [rank["peaks"][name] for rank in everyone],
            "losses": _losses(name, ranks),
        }
        if name in OURS:
            row["options"] = everyone[0]["options"][name]
            figures = [
                merge_step(step) for step in zip(*(rank["records"] for rank in ranks), strict=True)
            ]
            row |= {
                "exposed_embedding_ms": spread(
                    [sum(f["exposed_ms"][kind] for kind in EMBEDDING) for f in figures]
                ),
                "exposed_all_ms": spread([sum(f["exposed_ms"].values()) for f in figures]),
                "waited_for_lanes_ms": spread([f["spans_ms"].get("arrive", 0.0) for f in figures]),
                "exposed_ms": {
                    kind: statistics.median(f["exposed_ms"][kind] for f in figures)
                    for kind in figures[0]["exposed_ms"]
                },
                "straggler_percent": spread([f["straggler_percent"] for f in figures]),
                "compute_ms": spread([sum(f["compute_ms"]) / len(everyone) for f in figures]),
                "bytes": figures[-1]["bytes"],
                "spans_ms": {
                    span: statistics.median(f["spans_ms"].get(span, 0.0) for f in figures)
                    for span in figures[-1]["spans_ms"]
                },
            }
        rows.append(row)
    serial = next((row["losses"] for row in rows if row["arm"] == SERIAL), None)
    for row in rows:
        losses = row.pop("losses")
        if not all(math.isfinite(loss) for loss in losses):
            raise SystemExit(
                f"{row['arm']}: the loss is not finite: {losses[:5]} ... {losses[-5:]}"
            )
        apart = [abs(a - b) / abs(b) for a, b in zip(losses, serial or [], strict=True)]
        row |= {
            "first_step_relative_loss_difference_to_serial": apart[0],
            "largest_relative_loss_difference_to_serial": max(apart),
        }
        row |= {"first_loss": losses[0], "last_loss": losses[-1]}
        more = "".join(
            f"  {key} {row[key]['median']:.2f}"
            for key in ("exposed_embedding_ms", "exposed_all_ms")
            if key in row
        )
        if "straggler_percent" in row:
            more += (
                f"  straggler {row['straggler_percent']['median']:.1f} %  compute "
                f"{row['compute_ms']['median']:.1f}"
            )
            more += f"  lanes {row['waited_for_lanes_ms']['median']:.2f}"
        rate, step = row["samples_per_second"]["median"], row["step_ms"]["median"]
        print(
            f"{row['arm']:34s} step_ms {step:.1f}  samples/s {rate:.0f}{more}  loss apart "
            f"{max(apart):.0e}"
        )
    return rows


def _losses(name: str, ranks: list[dict[str, list]]) -> list[float]:
    """Of all ranks together: ours are summed already, TorchRec's are each rank's share."""
    parts = [rank["losses"] for rank in ranks]
    return parts[0] if name in OURS else [sum(shares) for shares in zip(*parts, strict=True)]


def claims_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by = {row["arm"]: row for row in rows}
    rate = {name: row["samples_per_second"]["median"] for name, row in by.items()}
    below = {
        key: 100 * (1 - by[PARTS][key]["median"] / by[SERIAL][key]["median"])
        for key in ("exposed_embedding_ms", "exposed_all_ms")
    }
    text = "full system: exposed communication below serial's over NCCL"
    found = [
        claim(
            f"{text}, ids, rows and gradients",
            90.0,
            below["exposed_embedding_ms"],
            "%",
            at_least=True,
        ),
        claim(f"{text}, all kinds", 90.0, below["exposed_all_ms"], "%", at_least=True),
        claim(
            "full system: samples/s over serial's",
            1.4,
            rate[PARTS] / rate[SERIAL],
            "times",
            at_least=True,
        ),
    ]
    if SPARSE_DIST in rate:
        value = rate[PARTS] / rate[SPARSE_DIST]
        found.append(
            claim(
                "full system: samples/s over TorchRec SparseDist's",
                1.3,
                value,
                "times",
                at_least=True,
            )
        )
    if SEMI_SYNC in rate:
        value = rate[PARTS] / rate[SEMI_SYNC]
        found.append(
            claim(
                "full system: samples/s over TorchRec SemiSync's (stale rows)",
                1.0,
                value,
                "times",
                at_least=True,
            )
        )
    return found


def rank_main(options: argparse.Namespace) -> None:
    collective = join(options.device, 120.0)
    device = collective.device
    workload = SHAPES[device.type]
    peer = [BASE, SPARSE_DIST, SEMI_SYNC] if importlib.util.find_spec("torchrec") else []
    if not peer:
        _say("TorchRec is not installed here: its arms are left out")
    elif device.type != "cuda":
        peer.remove(SEMI_SYNC)  # needs CUDA
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    arms, peaks = built([*peer, *OURS], workload, device)
    found = {"found": measure(arms, device, options.turns, options.each), "peaks": peaks}
    found["options"] = {name: taken(name, arms[name]) for name in OURS}
    everyone = [json.loads(part) for part in collective.gather_bytes(json.dumps(found).encode())]
    if collective.rank == 0:
        rows = rows_of(everyone, workload)
        made = claims_of(rows)
        if device.type == "cuda":
            more = {"commit": options.commit} if options.commit else {}
            command = (
                f"python3 benchmarks/bench_ladder_gpu.py --nproc {collective.world} --turns "
                f"{options.turns}"
            )
            packages = ("torchrec", "fbgemm-gpu", "triton")
            name = f"ladder-paper-{collective.world}ranks"
            write(
                name,
                get_gpu_name(),
                command,
                rows,
                made,
                packages,
                workload=asdict(workload),
                settings=get_gpu_settings(),
                **more,
            )
        else:
            print("times on a CPU say nothing about a GPU; nothing is written")
    collective.gather_bytes(b"")
    sys.stdout.flush()
    os._exit(0)  # several of NCCL's groups, on one GPU, would wait for each other


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--each", type=int, default=8, help="steps of a turn")
    parser.add_argument(
        "--commit", help=("of the tree that is measured, where it was copied without its history")
    )
    options = parser.parse_args()
    if is_rank():
        rank_main(options)
        return
    given = [
        f"--{name}={value}"
        for name, value in vars(options).items()
        if value is not None and name != "nproc"
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(options.nproc),
        __file__,
        *given,
    ]
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here; --device cpu tries the script with tiny sizes")
    if options.device == "cpu":
        sys.exit(subprocess.run(command, check=False, timeout=600).returncode)
    with divided_gpu(options.nproc) as divided:
        environment = {
            "CUDA_DEVICE_MAX_CONNECTIONS": queues(options.nproc),
            "OMP_NUM_THREADS": "2",
            **os.environ,
            **divided,
        }
        sys.exit(subprocess.run(command, env=environment, check=False, timeout=600).returncode)


if __name__ == "__main__":
    main()
