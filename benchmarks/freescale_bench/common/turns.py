"""Arms of a benchmark that take turns in one process, the resulting rows, and the process's
memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from freescale.ledger.merge import merge_step
from freescale_bench.common.results import Row, spread

EMBEDDING = ("ids", "rows", "gradients")  # kinds of collectives
SERIAL = "serial"  # the reference arm


def take_turns(arms: dict[str, Any], repetitions: int, steps: int) -> dict[str, dict[str, Any]]:
    """Runs the arms in turn, `steps` steps each, with a warm-up turn. The first step of a turn is
    not counted: its communication finished while the arms switched. Returns, by arm, all losses and
    the ledger's records of the counted steps."""
    names = list(arms)
    measured: dict[str, dict[str, Any]] = {name: {"losses": [], "records": []} for name in names}
    for repetition in range(repetitions + 1):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            measured[name]["losses"] += [arms[name].step() for _ in range(steps)]
            arms[name].quiet()
            records = arms[name].ledger.drain()
            if repetition:
                measured[name]["records"] += records[1:]
    dist.barrier()
    return measured


def wait_idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_turns(
    arms: dict[str, Any], device: torch.device, turns: int, each: int, lead: int = 0
) -> dict[str, dict[str, list[Any]]]:
    """Runs the arms in turn, and times each turn.

    `lead`: untimed steps at the start of a turn. The communication of a turn's first step finishes
    while the arms switch, unless the device is idle."""
    found: dict[str, dict[str, list[Any]]] = {
        name: {"turns": [], "cpu_ms": [], "losses": [], "records": []} for name in arms
    }
    names, on_gpu = list(arms), device.type == "cuda"
    for turn in range(turns + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            wait_idle(device)
            dist.barrier(group=_control())
            take = arms[name].begin_step  # TorchRec's pipelines do not sum the loss over ranks
            losses = [take() for _ in range(lead)]
            begin, used = time.perf_counter(), time.process_time()
            losses += [take() for _ in range(each)]
            wait_idle(device)
            took, used = time.perf_counter() - begin, time.process_time() - used
            arms[name].quiet()
            wait_idle(device)
            # on a GPU the ledger records nothing of TorchRec
            records = arms[name].ledger.drain() if is_ours(name) or not on_gpu else []
            found[name]["losses"] += [float(loss) for loss in losses]
            if turn:  # the first warms up
                found[name]["turns"].append(1e3 * took / each)
                found[name]["cpu_ms"].append(1e3 * used / each)
                found[name]["records"] += records[max(1, lead) :]
        say(f"{turn} of {turns} turns of each arm")
    return found


_groups: list[Any] = []


def _control() -> Any:
    if not _groups:
        _groups.append(dist.new_group(backend="gloo"))
    return _groups[0]


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def is_ours(name: str) -> bool:
    return not name.startswith("TorchRec")


def describe_steps(figures: Sequence[Mapping[str, Any]]) -> Row:
    """Summarizes the merged figures of steps as columns of a row."""

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
    """Makes a row per arm. `everyone`: the results of each rank; `samples`: of a rank's batch."""
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
    """Losses over all ranks: ours are summed already, TorchRec's are per rank."""
    parts = [rank["losses"] for rank in ranks]
    return parts[0] if summed else [sum(shares) for shares in zip(*parts, strict=True)]


def read_peak_memory() -> int:
    """Peak resident memory of this process so far, in bytes."""
    return _read_status("VmHWM")


def read_resident_memory() -> int:
    """Current resident memory of this process, in bytes."""
    return _read_status("VmRSS")


def _read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
