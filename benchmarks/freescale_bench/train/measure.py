"""Trains a shape like `freescale train` and measures its steps."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from freescale.pipeline.step_result import StepResult
from freescale.train.callbacks import Callback, RunView
from freescale.train.trainer import Trainer
from freescale_bench.common.device_profile import read_profile
from freescale_bench.common.results import spread
from freescale_bench.common.turns import wait_idle
from freescale_bench.train.flops import count_flops, count_flops_as_nvidia
from freescale_bench.train.shapes import Shape, write_interactions

WINDOW = 10  # steps, as many as between two log lines
PROFILED = 5  # steps, after the timed ones


class _Watch(Callback):
    """Times windows of steps, then profiles a few more."""

    def __init__(self, shape: Shape, compilations: Callable[[], list[str]]) -> None:
        self._shape, self._list_compiled = shape, compilations
        self.timed = shape.warmup + shape.windows * WINDOW  # steps
        self.total = self.timed + PROFILED + 2
        self.marks: list[float] = []  # times at the ends of windows
        self.first_step = 0.0
        self.compiled_first = self.compiled_timed = 0
        self._begin = time.perf_counter()
        self._profiler: torch.profiler.profile | None = None
        self.profile: Any = None

    def on_step(self, trainer: RunView, step: StepResult) -> None:
        number, shape = step.step, self._shape
        device = trainer.transport.device
        if number == 1:
            wait_idle(device)
            self.first_step = time.perf_counter() - self._begin
            self.compiled_first = len(self._list_compiled())
        if shape.warmup <= number <= self.timed and (number - shape.warmup) % WINDOW == 0:
            wait_idle(device)
            self.marks.append(time.perf_counter())
        if number == self.timed:
            self.compiled_timed = len(self._list_compiled())
            for kernel in self._list_compiled()[self.compiled_first :]:
                print(f"{shape.name}: compiled after step 1: {kernel}", file=sys.stderr)
        if device.type != "cuda":
            return
        if number == self.timed + 1:
            activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
            wait_idle(device)
            self._began = time.perf_counter()
        if number == self.timed + 1 + PROFILED and self._profiler is not None:
            wait_idle(device)
            wall = 1e3 * (time.perf_counter() - self._began)
            self._profiler.stop()
            self.profile = read_profile(self._profiler, PROFILED, wall)
            self._profiler = None


def build_config(shape: Shape, file: Path, cache: Path, device: str, steps: int) -> RunConfig:
    return RunConfig(
        DataConfig(
            data=str(file),
            cache=str(cache),
            max_length=shape.cap,
            split="none",
            negatives=shape.negatives,
        ),
        ModelConfig(
            width=shape.width,
            layers=shape.layers,
            heads=shape.heads,
            dropout=shape.dropout,
            temperature=shape.temperature,
            encoder=shape.encoder,
            position_bias=shape.biases,
            time_bias=shape.biases,
        ),
        TrainConfig(
            global_batch=shape.samples,
            epochs=10_000,
            steps=steps,
            device=device,
            profile_steps=0,  # `_Watch` profiles
        ),
    )


def measure_shape(
    shape: Shape, folder: Path, device: str, compilations: Callable[[], list[str]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measures a shape. Returns its row, and details: the slowest kernels and the ledger's
    spans."""
    file = write_interactions(shape, folder / f"{shape.name.replace(' ', '-')}.parquet")
    watch = _Watch(shape, compilations)
    config = build_config(shape, file, folder / "cache", device, watch.total)
    run = folder / f"run-{shape.name.replace(' ', '-')}"
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(config, run, callbacks=[watch])
    results = trainer.train()
    first = shape.warmup
    numbers = range(first, first + shape.windows * WINDOW)
    lengths = [trainer.data.batch(n).sequences["history"].lengths.numpy() for n in numbers]
    windows = [1e3 * (b - a) / WINDOW for a, b in zip(watch.marks, watch.marks[1:], strict=False)]
    per_window = [np.concatenate(lengths[i : i + WINDOW]) for i in range(0, len(lengths), WINDOW)]
    sizes = shape.width, shape.layers, shape.heads
    matrices = 6 if shape.encoder == "sasrec" else 5
    step = spread(windows)
    seconds = sum(windows) * WINDOW / 1e3
    ledger = results.get("ledger") or {}
    spans = ledger.get("spans_ms", {})
    row: dict[str, Any] = {
        **shape.describe(),
        "tokens": float(np.mean([each.sum() for each in lengths])),
        "step_ms": step,
        "mean_step_ms": 1e3 * seconds / len(lengths),
        "tokens_per_second": float(sum(each.sum() for each in lengths)) / seconds,
        "tflop_per_s": sum(count_flops(each, *sizes, matrices) for each in per_window)
        / seconds
        / 1e12,
        "tflop_per_s_by_nvidia": sum(count_flops_as_nvidia(each, *sizes) for each in per_window)
        / seconds
        / 1e12,
        "first_step_s": watch.first_step,
        "compilations_by_step_1": watch.compiled_first,
        "compilations_after_step_1": watch.compiled_timed - watch.compiled_first,
        "await_batch_percent": read_waits(run, numbers),
        "loss": results["loss"],
    }
    details: dict[str, Any] = {"shape": shape.name, "windows_ms": windows, "spans_ms": spans}
    if device == "cuda":
        row["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if watch.profile is not None:
        row |= watch.profile.describe()
        row["device_ms_of_step_percent"] = 100 * watch.profile.busy / step["median"]
        details["slowest_kernels"] = watch.profile.slowest
    return row, details


def read_waits(run: Path, steps: range) -> float:
    """Returns the percentage of these steps' time in which the main thread waited for a batch."""
    with open(run / "ledger.jsonl", encoding="utf-8") as file:
        timed = [figures for line in file if (figures := json.loads(line))["step"] in steps]
    waited = sum(figures["spans_ms"].get("await batch", 0.0) for figures in timed)
    return float(100 * waited / sum(figures["step_ms"] for figures in timed))
