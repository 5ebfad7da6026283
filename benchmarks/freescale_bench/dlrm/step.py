"""Training steps of dlrm_v4_hstu on one GPU, which has an eighth of every table: samples/s, TFLOP/s
by MLPerf's formula, memory, and the slowest kernels.

Samples all have 4,096 tokens, or Yambda's spread of lengths in batches of about as many tokens.
Rows are trained by row-wise Adagrad, everything else by Adam. The public model, if there is one,
has no tables: it gets rows as inputs and leaves their gradients, which favours it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import freescale
from freescale.batch import SequenceBatch
from freescale.ledger.device_profile import read_profile
from freescale.pipeline.dense.adamw import AdamW
from freescale.pipeline.pipeline import Pipeline
from freescale.transport.api import Transport
from freescale_bench.common.ranks import get_gpu_name, open_rank
from freescale_bench.common.results import Destination, Row, at_least, spread, write
from freescale_bench.common.turns import wait_idle
from freescale_bench.dlrm.shapes import FULL, SMALL, Shape, build_model, draw_lengths, make_batch
from freescale_bench.train.flops import count_flops_as_mlperf

LIMIT = 600.0  # seconds: limit of a collective
PARTS = 8  # GPUs that share the tables
SAMPLES, BATCHES = 128, 4
WARMUP, WINDOWS, WINDOW, PROFILED = 15, 6, 5, 3  # steps; a window is timed as a whole
AFTER = 3
ADAM = {"lr": 1e-6, "betas": (0.95, 0.999), "eps": 1e-8}


@dataclass(frozen=True)
class Data:
    """Batches that are trained one after another, again and again."""

    name: str
    batches: Sequence[SequenceBatch]
    tokens: Sequence[NDArray[np.int64]]  # of each sample of a batch, all included

    @staticmethod
    def make(shape: Shape, samples: int, mixed: bool, pinned: bool) -> Data:
        if mixed:  # about as many tokens as of long samples
            mean = draw_lengths(shape, 10_000, True, 0).mean()
            samples = round(samples * shape.longest / mean)
        lengths = [draw_lengths(shape, samples, mixed, seed) for seed in range(BATCHES)]
        made = [make_batch(shape, each, seed) for seed, each in enumerate(lengths)]
        others = shape.tokens - shape.longest
        return Data(
            "mixed lengths" if mixed else f"{shape.tokens:,} tokens",
            [batch.pin_memory() for batch in made] if pinned else made,
            [each + others for each in lengths],
        )

    def repeat(self) -> Iterator[SequenceBatch]:
        """The batches of all steps, and of the stages that prepare ahead."""
        return islice(cycle(self.batches), WARMUP + WINDOWS * WINDOW + PROFILED + AFTER)

    def describe(self, shape: Shape, windows: Sequence[float]) -> Row:
        """The figures of windows, in milliseconds a step."""
        samples = float(np.mean([len(each) for each in self.tokens]))
        tokens = float(np.mean([each.sum() for each in self.tokens]))
        sizes = shape.width, shape.layers, shape.heads
        flops = float(np.mean([count_flops_as_mlperf(each, *sizes) for each in self.tokens]))
        seconds = statistics.median(windows) / 1e3
        return {
            "data": self.name,
            "samples": samples,
            "tokens": tokens,
            "gflop_a_sample": flops / samples / 1e9,
            "step_ms": spread(windows),
            "samples_per_second": samples / seconds,
            "tflop_per_s": flops / seconds / 1e12,
        }


def bench_step(
    device: str, samples: int | None, public: Path | None, trial: bool, to: Destination
) -> None:
    if device == "cpu" and not trial:
        raise ValueError("the model is for a GPU: --device cuda, or --trial for tiny sizes")
    shape = SMALL if trial else FULL.divide(PARTS)
    count = samples or (4 if trial else SAMPLES)
    data = [Data.make(shape, count, mixed, device == "cuda") for mixed in (False, True)]
    rows: list[Row] = []
    with open_rank(device, LIMIT) as (transport, _):
        rows += _measure_here(shape, data, transport)
    if public is not None:
        from freescale_bench.dlrm.public_step import measure_public

        rows += measure_public(shape, data[:1], public, device)
    for row in rows:
        print({name: value for name, value in row.items() if name != "slowest_kernels"}, flush=True)
    if trial:
        return
    first = rows[0]
    claims = [
        at_least("TFLOP/s at 4,096 tokens, by MLPerf's formula", 400, first["tflop_per_s"], ""),
        at_least("samples/s at 4,096 tokens", 900, first["samples_per_second"], ""),
    ]
    command = f"freescale bench dlrm step --device {device}"
    write("dlrm-step", get_gpu_name(), command, rows, claims, ["triton"], to=to)


def _measure_here(shape: Shape, data: Sequence[Data], transport: Transport) -> list[Row]:
    torch.manual_seed(0)
    model = build_model(shape, table_device="meta")
    sharded = freescale.parallelize(
        model, model.features, freescale.RowWiseAdagrad(lr=1e-6, eps=1e-8), transport=transport,
        init_std=0.02, row_clip=None,
    )  # fmt: skip
    dense = AdamW(sharded.dense_parameters(), weight_decay=0.0, **ADAM)
    on_gpu = transport.device.type == "cuda"
    pipeline = Pipeline(
        sharded, dense, clip=1.0, precision="bf16" if on_gpu else "fp32", check=False
    )
    rows = []
    for each in data:
        steps = pipeline.run(each.repeat())
        windows, more = time_steps(steps, on_gpu)
        rows.append({"arm": "freescale", **each.describe(shape, windows), **more})
        rows[-1]["loss"] = [result.loss for result in steps][-1]
        pipeline.flush()
    rows[0]["rows"] = {spec.name: spec.rows for spec in sharded.tables.specs.values()}
    pipeline.close()
    return rows


def time_steps(steps: Iterator[Any], on_gpu: bool) -> tuple[list[float], dict[str, Any]]:
    """Runs steps. Returns milliseconds of a step by window, and other figures."""
    device = torch.device("cuda" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(WARMUP):
        next(steps)
    wait_idle(device)
    warm, windows = time.perf_counter() - begin, []
    for _ in range(WINDOWS):
        begin = time.perf_counter()
        for _ in range(WINDOW):
            next(steps)
        wait_idle(device)
        windows.append(1e3 * (time.perf_counter() - begin) / WINDOW)
    more: dict[str, Any] = {"warmup_s": warm}
    if on_gpu:
        more["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        more |= _profile(steps)
    return windows, more


def _profile(steps: Iterator[Any]) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        begin = time.perf_counter()
        for _ in range(PROFILED):
            next(steps)
        torch.cuda.synchronize()
        wall = 1e3 * (time.perf_counter() - begin)
    profile = read_profile(profiler, PROFILED, wall)
    return {**profile.describe(), "slowest_kernels": profile.slowest}
