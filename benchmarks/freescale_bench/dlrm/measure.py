"""Batches of dlrm_v4_hstu for a model that is timed, and the figures of its steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.batch import SequenceBatch
from freescale_bench.common.device_profile import read_profile
from freescale_bench.common.results import Row, spread
from freescale_bench.common.turns import wait_idle
from freescale_bench.dlrm.shapes import Shape, draw_lengths, make_batch
from freescale_bench.train.flops import count_flops_as_mlperf

BATCHES = 4
WARMUP, WINDOWS, WINDOW, PROFILED = 15, 6, 5, 3  # steps; a window is timed as a whole
AFTER = 3
ADAM: dict[str, Any] = {"lr": 1e-6, "betas": (0.95, 0.999), "eps": 1e-8}


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
