"""Step time and straggler % with one long history among short ones, whole and divided."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from freescale.ledger.collector import Collector
from freescale.ledger.ledger import Ledger
from freescale_bench.common.ranks import get_gpu_settings, open_rank
from freescale_bench.common.results import Destination, at_least, at_most, write
from freescale_bench.split.setting import (
    SETTINGS,
    SPLIT,
    WHOLE,
    Setting,
    Shape,
    build_pipeline,
    make_batch,
    shrink,
)

LONGEST, OTHERS, MEAN = 32_768, 127, 1000
BATCHES = 3  # different ones, in turn
WARM_UP = 6


def choose_shape(setting: Setting) -> Shape:
    drawn = np.random.default_rng(5).lognormal(np.log(MEAN) - 0.125, 0.5, OTHERS)
    others = np.clip(drawn, 16, 4 * MEAN).astype(int).tolist()
    shape = Shape(256, 4, 4, (LONGEST, *others))
    return shrink(shape, 40) if setting.trial else shape


def bench(setting: Setting, to: Destination) -> None:
    """Each arm in new processes."""
    rows = [setting.run_ranks("step", arm, setting.ranks) for arm in SETTINGS]
    by = {row["arm"]: row for row in rows}
    for row in rows:
        print(
            f"{row['arm']:6s} step {row['step_ms']['median']:7.1f} ms  straggler "
            f"{row['straggler_percent']:5.1f} %  imbalance {row['imbalance']:.3f}  keys and values "
            f"{row['bytes_per_step'].get('attention', 0) / 1e6:.0f} MB a step"
        )
    gain = by[WHOLE]["step_ms"]["median"] / by[SPLIT]["step_ms"]["median"]
    text = f"one history of {LONGEST:,} events and {OTHERS} of about {MEAN:,}, divided: "
    claims = [
        at_most(text + "straggler time, of the step", 5.0, by[SPLIT]["straggler_percent"], "%"),
        at_least(text + "step time of whole histories over that of divided ones", 1.8, gain, "x"),
    ]
    if not setting.trial:
        name = f"split-step-{setting.ranks}ranks"
        shape = choose_shape(setting).describe()
        command = f"{setting.name_command('step')} --nproc {setting.ranks}"
        command += f" --steps {setting.steps}"
        write(name, setting.testbed, command, rows, claims, to=to, shape=shape)


def _profile(run: Iterator[Any], setting: Setting, arm: str, rank: int) -> None:
    """Prints what the first and the last rank spend some steps with, before those measured."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (setting.device == "cuda")
    begin = time.perf_counter()
    with profile(activities=activities) as profiler:
        for _ in range(setting.profiled):
            next(run)
        if setting.device == "cuda":
            torch.cuda.synchronize()
    if rank not in (0, setting.ranks - 1):
        return
    milliseconds = 1000 * (time.perf_counter() - begin)
    averages = profiler.key_averages()
    for order in ("self_cpu_time_total", "self_device_time_total"):
        print(f"{arm}, rank {rank}: {setting.profiled} steps, {milliseconds:.0f} ms, by {order}")
        print(averages.table(sort_by=order, row_limit=25, max_name_column_width=60), flush=True)


def measure(setting: Setting, arm: str, output: Path) -> None:
    """As one of the ranks; rank 0 writes the row."""
    shape, world = choose_shape(setting), setting.ranks
    with open_rank(setting.device, setting.limit) as (transport, _):
        batches = [make_batch(shape, transport.rank, world, number) for number in range(BATCHES)]
        steps = 4 if setting.trial else setting.steps
        precision = "bf16" if setting.device == "cuda" else "fp32"
        pipeline = build_pipeline(shape, transport, SETTINGS[arm], precision=precision)
        more = WARM_UP + setting.profiled
        run = pipeline.run(batches[number % BATCHES] for number in range(more + steps))
        for _ in range(WARM_UP):
            next(run)
        if setting.profiled:
            _profile(run, setting, arm, transport.rank)
        if setting.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        ledger = transport.ledger
        assert isinstance(ledger, Ledger)
        ledger.drain()
        collector = Collector(ledger, transport.rank, world, transport.gather_bytes, None)
        for _ in run:
            pass
        pipeline.flush()
        figures: dict[str, Any] | None = collector.close(transport.device)
        choices = pipeline.describe_choices()
        pipeline.close()
    if figures is not None:
        row = {"arm": arm, "ranks": world, "choices": choices, "settings": get_gpu_settings()}
        output.write_text(json.dumps(row | figures), encoding="utf-8")
