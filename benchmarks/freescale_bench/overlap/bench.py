"""`freescale bench overlap`: what communication costs the compute beside it, over NCCL and over
hostwire, and how fast it is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from freescale.kernels.dispatch.versions import has_triton
from freescale.launch.ranks import is_rank
from freescale.ledger.machine import describe_machine, get_gpu_settings, get_versions
from freescale_bench.common.ranks import join, start_ranks
from freescale_bench.common.terminal import show_table
from freescale_bench.overlap.arms import SECONDS, Bed
from freescale_bench.overlap.copies import WAYS
from freescale_bench.overlap.overlapped import FULL, measure_layers, measure_products
from freescale_bench.overlap.transfers import measure_alone, measure_throughput
from freescale_bench.overlap.witness import measure_witness

LIMIT = 300.0  # seconds of a whole run
PARTS: dict[str, Callable[[Bed], None]] = {
    "products": measure_products,
    "layer": measure_layers,
    "alone": measure_alone,
    "throughput": measure_throughput,
    "witness": measure_witness,
}
COLUMNS = ("what", "ms", "rate", "of bound", "alone ms", "slower")


def bench_overlap(ranks: int, device: str, only: Sequence[str], output: Path) -> int:
    """Starts the ranks, or is one of them; rank 0 prints the table and writes the JSON. Returns the
    exit status."""
    if not output.parent.is_dir():
        raise ValueError(
            f"there is no folder {output.parent} for the results; make it or give another --output"
        )
    if is_rank():
        _measure(device, only, output)
        return 0
    if ranks < 2:
        raise ValueError(f"an AllToAll needs at least 2 ranks, not {ranks}: --nproc 4")
    arguments = ["--device", device, "--output", str(output.resolve())]
    arguments += [word for part in only for word in ("--only", part)]
    return start_ranks("overlap", arguments, ranks, device, LIMIT)


def _measure(device: str, only: Sequence[str], output: Path) -> None:
    if device == "cuda" and not has_triton():
        raise ValueError(
            "the layer and the witness are written in Triton, which is not installed here"
        )
    began = time.perf_counter()
    torch.manual_seed(0)
    bed = Bed(join(device, SECONDS), began)
    bed.say(f"{bed.world} ranks on {bed.device}")
    for name in only or PARTS:
        PARTS[name](bed)
        bed.idle()
        bed.say(f"{name} is done")
        if bed.rank == 0:  # after each part: what was measured stays if a later one fails
            output.write_text(json.dumps(_result(bed, device), indent=1) + "\n", encoding="utf-8")
    if bed.rank == 0:
        show_table(bed.rows, f"{bed.world} ranks, {device}", COLUMNS, format_cells)
        for text in make_notes(bed.rows):
            print(text)
        if device == "cpu":
            print("times on a CPU say nothing about a GPU")
        print(output)
    bed.close()


def _result(bed: Bed, device: str) -> dict[str, Any]:
    return {
        "name": "overlap",
        "device": device,
        "ranks": bed.world,
        "machine": describe_machine(),
        "versions": get_versions("triton", "freescale"),
        "settings": get_gpu_settings(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "rows": bed.rows,
        "figures": make_figures(bed.rows),
    }


def format_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row as text, column by column; empty where nothing was measured."""

    def show(name: str, text: Callable[[Any], str]) -> str:
        return text(row[name]) if name in row else ""

    return (
        f"{row['case']}, {row['arm']}" + show("skipped", lambda why: f": skipped, {why}"),
        show("ms", lambda ms: f"{ms['median']:.3f}"),
        show("rate", lambda rate: f"{rate:,.2f} {row['unit']}"),
        show("ceiling_percent", lambda percent: f"{percent:.1f} %"),
        show("alone_ms", lambda ms: f"{ms:.3f}"),
        show("slower_percent", lambda percent: f"{percent:+.1f} %"),
    )


# ---- from the rows


def find_best_collective(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """For each compute, the row of NCCL (gloo) with the channel limit that slows it least."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if "slower_percent" in row and not row["arm"].startswith("hostwire"):
            known = found.setdefault(row["case"], row)
            found[row["case"]] = min(known, row, key=lambda one: one["slower_percent"])
    return list(found.values())


def make_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a claim can be made of."""
    found: dict[str, float] = {}
    ours = [
        row["slower_percent"]
        for row in rows
        if "slower_percent" in row and row["arm"] == "hostwire"
    ]
    full = [row["slower_percent"] for row in rows if "slower_percent" in row and row["arm"] == FULL]
    best = [row["slower_percent"] for row in find_best_collective(rows)]
    if ours:
        found |= {
            "hostwire, most slow-down, %": max(ours),
            "collective at its best, most slow-down, %": max(best),
        }
        found["collective at its best, least slow-down, %"] = min(best)
    if full:
        found[f"{FULL}, most slow-down, %"] = max(full)
    for way in WAYS:
        shares = [
            row["ceiling_percent"] for row in rows if row["arm"] == f"hostwire's copies {way}"
        ]
        if shares:
            found[f"copies {way}, worst % of plain"] = min(shares)
    for row in rows:
        if row["group"] == "throughput" and "flight" in row:
            found[f"{row['arm']}, {row['case']}, % of bound"] = row["ceiling_percent"]
        if "arrived_meanwhile" in row:
            found[f"witness, {row['arm']}"] = float(row["arrived_meanwhile"] and row["right"])
            found[f"witness, {row['arm']} waited"] = float(row["arrived_after_it"])
    return found


def make_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the table does not say by itself: who is faster with nothing beside it, and at which
    setting NCCL disturbs least."""
    texts = [
        f"{row['case']}: least slowed by {row['arm']}, {row['slower_percent']:+.1f} %"
        for row in find_best_collective(rows)
    ]
    for case in dict.fromkeys(row["case"] for row in rows if row["group"] == "alone"):
        single = [
            row
            for row in rows
            if row["group"] == "alone" and row["case"] == case and row["flight"] == 1
        ]
        first, second = sorted(single, key=lambda row: row["ms"]["median"])
        times = second["ms"]["median"] / first["ms"]["median"]
        texts.append(
            f"{case} with nothing beside it: {first['arm']} is {times:.2f} times as fast "
            f"as {second['arm']}"
        )
    for row in rows:
        if "arrived_meanwhile" in row:
            when = (
                "arrived meanwhile"
                if row["arrived_meanwhile"]
                else ("did not arrive before it ended")
            )
            texts.append(
                f"{row['arm']}, a kernel on every multiprocessor for "
                f"{row['kernel_ms']:.0f} ms: {when}"
            )
    return texts
