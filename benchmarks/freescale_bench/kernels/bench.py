"""`freescale bench kernels`: the Triton kernels on one GPU, against plain torch and the GPU's
limits."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from freescale.kernels.dispatch.versions import has_triton
from freescale_bench.common.markdown import format_rows
from freescale_bench.common.ranks import get_gpu_name, require_gpu
from freescale_bench.common.results import Destination, Target, describe_run, make_claims, write
from freescale_bench.kernels.attention import measure_attention
from freescale_bench.kernels.launches import measure_launches
from freescale_bench.kernels.layers import measure_layers, measure_pieces
from freescale_bench.kernels.measure import Bench
from freescale_bench.kernels.sampled_softmax import measure_sampled_softmax
from freescale_bench.kernels.table import HEAD, format_row
from freescale_bench.kernels.table_rows import measure_rows

# Each returns figures by name, the inputs of claims.
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
    """Runs the parts, or those in `only`. Returns rows and figures."""
    prepare_device(device)
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


def prepare_device(device: str) -> None:
    """Checks that there are kernels for a device; on a CPU, chooses Triton's interpreter."""
    if not has_triton():
        raise ValueError(
            "the kernels are written in Triton, which is not installed here: "
            "pip install 'freescale[triton]' (Linux only)"
        )
    require_gpu(device)
    if device == "cpu":
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                "Triton was imported before its interpreter was chosen; start a new "
                "process for --device cpu"
            )
        # Triton reads it on import, at the first launch
        os.environ["TRITON_INTERPRET"] = "1"


def bench_kernels(device: str, only: Sequence[str], output: Path | None, to: Destination) -> None:
    """Prints the table. Writes the rows to `output`, or a result with claims if this was a whole
    run on a GPU."""
    if output and not output.parent.is_dir():
        raise ValueError(
            f"there is no folder {output.parent} for the results; create it or change --output"
        )
    bench, figures = measure_kernels(device, only)
    print(
        f"ceilings: copy {bench.bandwidth:.3g} TB/s, bf16 matrix product {bench.flops:.3g} TFLOP/s"
    )
    print(format_rows(HEAD, [format_row(row) for row in bench.rows if "ms" in row]))
    if device == "cpu":
        print("interpreter times mean nothing")
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


def list_targets() -> Iterator[Target]:
    for name in ("gather", "sgd", "adagrad", "rowwise_adagrad", "adam"):
        yield Target(
            f"{name}, % of ceiling",
            f"{name} of 1,000,000 random rows of 128 floats, of copy bandwidth",
            70,
            "%",
        )
    for way, width, rate in (
        ("forward", 128, 420),
        ("backward", 128, 474),
        ("forward", 64, 300),
        ("backward", 64, 200),
    ):
        text = f"attention {way}, 4 x 16,384 tokens, 4 heads of {width}"
        yield Target(f"attention {way}, full, {width} wide, TFLOP/s", text, rate, "TFLOP/s")
        text = f"attention {way}, 4 heads of {width}, log-normal lengths, of the full-length rate"
        yield Target(f"attention {way}, {width} wide, log-normal % of full", text, 85, "%")
    text = "attention backward, 32 x 4,099 tokens, 4 heads of 256"
    yield Target("attention backward, fixed, wide, ms", text, 8.25, "ms", at_least=False)
    for width in (64, 128):
        for way in ("forward", "backward"):
            text = f"attention {way}, 32 x 4,096 tokens, 4 heads of {width}: time with both biases"
            name = f"attention {way}, {width} wide, biases, times without"
            yield Target(name, f"{text}, of that without", 2, "times", at_least=False)
    text = "HSTU layer forward + backward, log-normal lengths up to 21,000, faster than eager"
    yield Target("layer, times faster", text, 5, "times")
    text = "peak memory of a layer per token, at 21,000 of that at 5,250"
    yield Target(
        "layer, memory per token, longest over a quarter of it", text, 1.05, "times", at_least=False
    )


def _write_rows(output: Path, device: str, bench: Bench, figures: dict[str, float]) -> None:
    result = {
        "name": "kernels",
        "device": device,
        **describe_run(["triton", "freescale"]),
        "ceilings": bench.ceilings,
        "rows": bench.rows,
        "figures": figures,
    }
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(output)
