"""`freescale bench kernels`: the Triton kernels on one GPU beside plain torch and beside what the
GPU can do."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from freescale.kernels.dispatch.versions import has_triton
from freescale.ledger.machine import describe_machine, get_versions
from freescale_bench.common.machine import get_gpu_name
from freescale_bench.common.markdown import format_rows
from freescale_bench.common.results import Destination, make_claims, write
from freescale_bench.kernels.attention import measure_attention
from freescale_bench.kernels.claims import list_targets
from freescale_bench.kernels.launches import measure_launches
from freescale_bench.kernels.layers import measure_layers, measure_pieces
from freescale_bench.kernels.measure import Bench
from freescale_bench.kernels.sampled_softmax import measure_sampled_softmax
from freescale_bench.kernels.table import HEAD, format_row
from freescale_bench.kernels.table_rows import measure_rows

# Each returns figures by name, what a claim can be made of.
PARTS: dict[str, Callable[[Bench], dict[str, float]]] = {
    "rows": measure_rows,
    "attention": measure_attention,
    "pieces": measure_pieces,
    "layer": measure_layers,
    "sampled_softmax": measure_sampled_softmax,
    "launches": measure_launches,
}


def measure_kernels(
    device: str, only: Sequence[str] = (), seen: Callable[[dict[str, Any]], None] = lambda row: None
) -> tuple[Bench, dict[str, float]]:
    """Runs the parts, or some of them; rows and figures."""
    if not has_triton():
        raise ValueError(
            "the kernels are written in Triton, which is not installed here: "
            "pip install 'freescale[triton]' (Linux alone)"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "there is no GPU here; try the benchmark with --device cpu: tiny sizes, "
            "through Triton's interpreter"
        )
    if device == "cpu":
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                "Triton was imported before its interpreter was chosen; start a new "
                "process for --device cpu"
            )
        # read when Triton is imported, which happens at the first launch
        os.environ["TRITON_INTERPRET"] = "1"
    torch.manual_seed(0)
    figures: dict[str, float] = {}
    bench = Bench(device, seen)
    for name in only or PARTS:
        started = time.perf_counter()
        figures |= PARTS[name](bench)
        if device == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    return bench, figures


def bench_kernels(device: str, only: Sequence[str], output: Path | None, to: Destination) -> None:
    """Prints the table. Writes the rows to `output`, or a result with claims; the latter of a whole
    run on a GPU only."""
    if output and not output.parent.is_dir():
        raise ValueError(
            f"there is no folder {output.parent} for the results; make it or give another --output"
        )
    bench, figures = measure_kernels(device, only)
    print(
        f"ceilings: copy {bench.bandwidth:.3g} TB/s, bf16 matrix product {bench.flops:.3g} TFLOP/s"
    )
    print(format_rows(HEAD, [format_row(row) for row in bench.rows if "ms" in row]))
    if device == "cpu":
        print("times of the interpreter say nothing about the kernels")
    if output:
        _write_rows(output, device, bench, figures)
        return
    claims = make_claims(list_targets(), figures)
    if device == "cpu" or only:
        print(f"{len(bench.rows)} rows and {len(claims)} claims, not written: --output writes them")
        return
    write(
        "kernels",
        get_gpu_name(),
        "freescale bench kernels",
        bench.rows,
        claims,
        ["triton"],
        to=to,
        ceilings=bench.ceilings,
    )


def _write_rows(output: Path, device: str, bench: Bench, figures: dict[str, float]) -> None:
    result = {
        "name": "kernels",
        "device": device,
        "machine": describe_machine(),
        "versions": get_versions("triton", "freescale"),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "ceilings": bench.ceilings,
        "rows": bench.rows,
        "figures": figures,
    }
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(output)
