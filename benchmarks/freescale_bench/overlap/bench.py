"""`freescale bench overlap`: how much communication over NCCL and hostwire slows down concurrent
compute."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from freescale.kernels.dispatch.versions import has_triton
from freescale.launch.ranks import is_rank
from freescale_bench.common.ranks import get_gpu_name, get_gpu_settings, join, start_ranks
from freescale_bench.common.results import Destination, Row, Target, make_claims, show_claims, write
from freescale_bench.overlap.arms import SECONDS, Bed
from freescale_bench.overlap.overlapped import FULL, measure_layers, measure_products
from freescale_bench.overlap.witness import measure_witness

LIMIT = 300.0  # seconds: limit of a whole run
PARTS: dict[str, Callable[[Bed], None]] = {
    "products": measure_products,
    "layer": measure_layers,
    "witness": measure_witness,
}
TARGETS = [
    Target("hostwire, most slow-down, %",
          "compute during hostwire's AllToAlls, as many as NCCL carries, longer than alone: the "
          "worst of products and layers", 1.5, "%", at_least=False),
    Target(f"{FULL}, most slow-down, %", "the same with as many as hostwire can carry", 1.5, "%",
          at_least=False),
    Target("witness, hostwire",
          "an AllToAll arrived while a kernel held every multiprocessor (1: it did)", 1, ""),
    Target("witness, nccl waited",
          "the control: NCCL's did not arrive before the kernel's end (1: it did not)", 1, ""),
]  # fmt: skip


def bench_overlap(ranks: int, device: str, only: Sequence[str], to: Destination) -> int:
    """Starts the ranks, or runs as one of them. A whole run on GPUs is written as a result. Returns
    the exit status."""
    if is_rank():
        _measure(device, only, to)
        return 0
    if ranks < 2:
        raise ValueError(f"an AllToAll needs at least 2 ranks, not {ranks}: --nproc 4")
    arguments = ["--device", device, *to.as_arguments()]
    arguments += [word for part in only for word in ("--only", part)]
    return start_ranks("overlap", arguments, ranks, device, LIMIT)


def _measure(device: str, only: Sequence[str], to: Destination) -> None:
    if device == "cuda" and not has_triton():
        raise ValueError(
            "the layer and the witness are written in Triton, which is not installed here"
        )
    torch.manual_seed(0)
    bed = Bed(join(device, SECONDS), time.perf_counter())
    bed.say(f"{bed.world} ranks on {bed.device}")
    for name in only or PARTS:
        PARTS[name](bed)
        bed.idle()
        bed.say(f"{name} is done")
    if bed.rank == 0:
        claims = make_claims(TARGETS, make_figures(bed.rows))
        rows = [*bed.rows, *make_best_rows(bed.rows)]
        if device == "cpu" or only:
            print(*map(json.dumps, rows), sep="\n")
            show_claims(claims)
            print("nothing is written: this was not a whole run on GPUs")
        else:
            name, settings = f"overlap-{bed.world}ranks", get_gpu_settings()
            command = f"freescale bench overlap --nproc {bed.world}"
            write(name, get_gpu_name(), command, rows, claims, ["triton"], to=to, settings=settings)
    bed.close()


# ---- figures from rows


def find_best_collective(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns, for each compute, the row of NCCL (gloo) with the channel limit that slows it
    least."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if "slower_percent" in row and not row["arm"].startswith("hostwire"):
            known = found.setdefault(row["case"], row)
            found[row["case"]] = min(known, row, key=lambda one: one["slower_percent"])
    return list(found.values())


def make_best_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Rows of NCCL at the channel limit that slows each compute least: reported, not part of
    claims."""
    keep = ("case", "arm", "slower_percent", "messages", "messages_ms", "rate", "unit")
    for row in find_best_collective(rows):
        yield {"group": "best setting of nccl"} | {name: row[name] for name in keep}


def make_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Computes the figures of claims."""
    found: dict[str, float] = {}
    for arm in ("hostwire", FULL):
        slower = [
            row["slower_percent"] for row in rows if row["arm"] == arm and "slower_percent" in row
        ]
        if slower:
            found[f"{arm}, most slow-down, %"] = max(slower)
    for row in rows:
        if "arrived_meanwhile" in row:
            found[f"witness, {row['arm']}"] = float(row["arrived_meanwhile"] and row["right"])
            found[f"witness, {row['arm']} waited"] = float(row["arrived_after_it"])
    return found
