"""The ladder on GPU ranks that share one GPU through MPS: TorchRec's pipelines, its stale SemiSync
among them, then FreeScale with one technique more on each rung, and with the defaults of `freescale
train`, on the same HSTU, data and seeds.

TorchRec needs its CUDA kernels: torchrec 1.6.1 with fbgemm-gpu 1.6.0 beside torch 2.11; without
them its arms are left out, and that is said. A turn of an arm is a few steps between two moments at
which the device is idle; a step's time is the turn's over its steps, for every arm alike. What is
exposed comes from our ledger: of our arms only. NCCL runs over loopback sockets here: its speed
says nothing about NVLink. Lanes that do not go over hostwire go through pinned memory and gloo.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from freescale.launch.ranks import is_rank
from freescale.ledger.machine import get_gpu_name, get_gpu_settings
from freescale.ledger.merge import merge_step
from freescale_bench.common.ranks import join, start_ranks
from freescale_bench.common.results import Claim, Destination, Row, at_least, write
from freescale_bench.common.spread import spread
from freescale_bench.common.torchrec import has_torchrec
from freescale_bench.common.workload import Workload
from freescale_bench.ladder.arms import BASE, SEMI_SYNC, build_arm, find_options
from freescale_bench.ladder.rungs import OURS, PARTITIONED, SERIAL, SPARSE_DIST

# The paper's shape divided by 3: log-normal histories of median 3,000 and at most 21,000 items, 12
# % collisions.
SHAPES = {
    "cuda": Workload(
        rows=4_000_000, width=128, samples=32, median_length=1000, sigma=1.0, maximum_length=7000,
        collisions=0.12, layers=5, inner=256, heads=2, steps=8, dense_learning_rate=1e-4,
        row_learning_rate=0.01,
    ),
    "cpu": Workload(
        rows=20_000, width=16, samples=4, median_length=50, sigma=1.0, maximum_length=200,
        collisions=0.12, layers=1, inner=32, heads=2, steps=8,
    ),
}  # fmt: skip
EMBEDDING = ("ids", "rows", "gradients")
LIMIT = 600.0  # seconds of a whole run


def wait_idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def build_arms(
    names: list[str], workload: Workload, device: torch.device
) -> tuple[dict[str, Any], dict[str, int]]:
    """The arms, after two steps each, and what each adds to the device's peak."""
    rank, world = dist.get_rank(), dist.get_world_size()
    arms, peaks = {}, {}
    for name in names:
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        arms[name] = build_arm(name, workload, rank, world, device)
        for _ in range(2):
            arms[name].step()
        wait_idle(device)
        peaks[name] = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
        _say(f"{name}: built")
    return arms, peaks


def measure(
    arms: dict[str, Any], device: torch.device, turns: int, each: int, lead: int = 0
) -> dict[str, dict[str, list[Any]]]:
    """`lead`: steps at the begin of a turn that are not timed. What the first would wait for was
    done before, while the arms changed; a device that is idle has nothing done before."""
    found: dict[str, dict[str, list[Any]]] = {
        name: {"turns": [], "losses": [], "records": []} for name in arms
    }
    names, on_gpu = list(arms), device.type == "cuda"
    for turn in range(turns + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            wait_idle(device)
            dist.barrier(group=_control())
            take = arms[name].begin_step  # a pipeline of TorchRec's does not sum its loss
            losses = [take() for _ in range(lead)]
            begin = time.perf_counter()
            losses += [take() for _ in range(each)]
            wait_idle(device)
            took = time.perf_counter() - begin
            arms[name].quiet()
            wait_idle(device)
            # on a GPU the ledger sees nothing of TorchRec
            records = arms[name].ledger.drain() if is_ours(name) or not on_gpu else []
            found[name]["losses"] += [float(loss) for loss in losses]
            if turn:  # the first warms up
                found[name]["turns"].append(1e3 * took / each)
                found[name]["records"] += records[max(1, lead) :]
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


def is_ours(name: str) -> bool:
    return not name.startswith("TorchRec")


def describe_steps(figures: Sequence[Mapping[str, Any]]) -> Row:
    """Columns of a row, from the merged figures of its steps."""

    def each(name: str) -> dict[str, dict[str, float]]:
        return {
            key: spread([step[name].get(key, 0.0) for step in figures]) for key in figures[-1][name]
        }

    waits = [step["exposed_ms"] for step in figures]
    lanes = [step["spans_ms"].get("arrive", 0.0) for step in figures]
    collisions = [step["collision_percent"] for step in figures if "collision_percent" in step]
    return {
        "exposed_embedding_ms": spread([sum(of[kind] for kind in EMBEDDING) for of in waits]),
        "exposed_all_ms": spread([sum(of.values()) for of in waits]),
        "waited_for_lanes_ms": spread(lanes),
        "exposed_ms": each("exposed_ms"),
        "straggler_percent": spread([step["straggler_percent"] for step in figures]),
        "compute_ms": spread([statistics.fmean(step["compute_ms"]) for step in figures]),
        "collision_percent": spread(collisions or [0.0]),
        "bytes": figures[-1]["bytes"],
        "bytes_per_step": {
            kind: statistics.fmean(step["bytes"][kind] for step in figures)
            for kind in figures[0]["bytes"]
        },
        "spans_ms": each("spans_ms"),
    }


def make_rows(everyone: list[Row], samples: int, on_gpu: bool) -> list[Row]:
    """everyone: what each rank found. `samples`: of a rank's batch."""
    rows = []
    for name in everyone[0]["found"]:
        ranks = [rank["found"][name] for rank in everyone]
        step = [max(times) for times in zip(*(rank["turns"] for rank in ranks), strict=True)]
        row: dict[str, Any] = {
            "arm": name,
            "ranks": len(everyone),
            "step_ms": spread(step),
            "samples_per_second": spread([1e3 * samples * len(everyone) / ms for ms in step]),
            "peak_memory_bytes_per_rank": [rank["peaks"][name] for rank in everyone],
            "losses": _merge_losses(ranks, summed=is_ours(name)),
        }
        if name in everyone[0].get("options", ()):
            row["options"] = everyone[0]["options"][name]
        if ranks[0]["records"]:
            figures = [
                merge_step(step) for step in zip(*(rank["records"] for rank in ranks), strict=True)
            ]
            row |= describe_steps(figures)
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


def _merge_losses(ranks: list[dict[str, list[Any]]], summed: bool) -> list[float]:
    """Of all ranks together: ours are summed already, TorchRec's are each rank's share."""
    parts = [rank["losses"] for rank in ranks]
    return parts[0] if summed else [sum(shares) for shares in zip(*parts, strict=True)]


def make_claims(rows: list[Row]) -> list[Claim]:
    by = {row["arm"]: row for row in rows}
    rate = {name: row["samples_per_second"]["median"] for name, row in by.items()}
    below = {
        key: 100 * (1 - by[PARTITIONED][key]["median"] / by[SERIAL][key]["median"])
        for key in ("exposed_embedding_ms", "exposed_all_ms")
    }
    text = "full system: exposed communication below serial's over NCCL"
    found = [
        at_least(f"{text}, ids, rows and gradients", 90.0, below["exposed_embedding_ms"], "%"),
        at_least(f"{text}, all kinds", 90.0, below["exposed_all_ms"], "%"),
        at_least(
            "full system: samples/s over serial's", 1.4, rate[PARTITIONED] / rate[SERIAL], "times"
        ),
    ]
    if SPARSE_DIST in rate:
        value = rate[PARTITIONED] / rate[SPARSE_DIST]
        found.append(
            at_least("full system: samples/s over TorchRec SparseDist's", 1.3, value, "times")
        )
    if SEMI_SYNC in rate:
        value = rate[PARTITIONED] / rate[SEMI_SYNC]
        found.append(
            at_least(
                "full system: samples/s over TorchRec SemiSync's (stale rows)", 1.0, value, "times"
            )
        )
    return found


def bench_on_gpu(ranks: int, turns: int, each: int, trial: bool, to: Destination) -> int:
    """Starts the ranks, or is one of them. Returns the exit status."""
    device = "cpu" if trial else "cuda"
    if not is_rank():
        arguments = ["--device", "cuda", "--turns", str(turns), "--each", str(each)]
        arguments += [*to.as_arguments(), *(["--trial"] if trial else [])]
        return start_ranks("ladder", arguments, ranks, device, LIMIT, threads=2)
    _run_rank(device, turns, each, to)
    return 0


def _run_rank(device_type: str, turns: int, each: int, to: Destination) -> None:
    collective = join(device_type, 120.0)
    device = collective.device
    workload = SHAPES[device.type]
    peer = [BASE, SPARSE_DIST, SEMI_SYNC] if has_torchrec() else []
    if not peer:
        _say("TorchRec is not installed here: its arms are left out")
    elif device.type != "cuda":
        peer.remove(SEMI_SYNC)  # needs CUDA
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    arms, peaks = build_arms([*peer, *OURS], workload, device)
    found: dict[str, Any] = {"found": measure(arms, device, turns, each), "peaks": peaks}
    found["options"] = {name: find_options(name, arms[name]) for name in OURS}
    everyone = [json.loads(part) for part in collective.gather_bytes(json.dumps(found).encode())]
    if collective.rank == 0:
        rows = make_rows(everyone, workload.samples, device.type == "cuda")
        claims = make_claims(rows)
        if device.type == "cuda":
            write(
                f"ladder-paper-{collective.world}ranks",
                get_gpu_name(),
                f"freescale bench ladder --device cuda --nproc {collective.world} --turns {turns}",
                rows,
                claims,
                ("torchrec", "fbgemm-gpu", "triton"),
                to=to,
                workload=asdict(workload),
                settings=get_gpu_settings(),
            )
        else:
            print("times on a CPU say nothing about a GPU; nothing is written")
    collective.gather_bytes(b"")
    sys.stdout.flush()
    os._exit(0)  # several of NCCL's groups, on one GPU, would wait for each other
