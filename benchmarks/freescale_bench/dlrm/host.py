"""Training steps of dlrm_v4_hstu with tables in host memory, against the same tables on the GPU.

Three arms take turns in one process, on the same batches of 4,096 tokens a sample:

    device        all tables on the GPU
    host context  the table of context, nearly all of the 600 GB, in host memory: what `--placement
                  auto` does with tables that do not fit
    host          all tables in host memory

Items, artists and albums have half of their rows, so that all arms fit at once; the context has a
hundredth. Ids follow a power law, as in `step`. No batch repeats. Caches hold a quarter more than
three batches read and are full when the steps begin: each row that comes evicts another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

import freescale
from freescale.batch import SequenceBatch
from freescale.embedding.placement import Wanted
from freescale.embedding.sharded_model import ShardedModel
from freescale.embedding.storage.cached import CachedStorage
from freescale.ledger.ledger import Ledger
from freescale.pipeline.dense.local import AdamW
from freescale.pipeline.pipeline import Pipeline
from freescale.transport.local import LocalTransport
from freescale_bench.common.ranks import get_gpu_name, require_gpu
from freescale_bench.common.results import Destination, Row, Target, make_claims, spread, write
from freescale_bench.common.turns import read_peak_memory, wait_idle
from freescale_bench.dlrm.measure import ADAM
from freescale_bench.dlrm.shapes import FULL, SMALL, Shape, build_model, draw_lengths, make_batch
from freescale_bench.host_tables.bench import fill_cache
from freescale_bench.host_tables.setting import COUNTERS

TABLES = ("item", "item_features", "context_features")
ARMS = {"device": (), "host context": TABLES[2:], "host": TABLES}  # tables in host memory
WARMUP, TURNS, LEAD, WINDOW = 8, 6, 1, 5  # steps, but turns; those of the lead are not timed
AFTER = 3  # batches for the stages that prepare ahead
ITEMS, CONTEXT = 2, 100  # of these many parts of the rows
SAMPLES, ROOM = 128, 1.25
_TEXT = "step with {} in host memory over all on the device"
TARGETS = [
    Target("host context", _TEXT.format("the table of context"), 1.05, "x", at_least=False),
    Target("host", _TEXT.format("all tables"), 1.05, "x", at_least=False),
]


def choose_shape(trial: bool) -> Shape:
    if trial:
        return replace(SMALL, rows=(2000, 400, 600), context=(500, *(200,) * 7))
    return replace(FULL, rows=FULL.divide(ITEMS).rows, context=FULL.divide(CONTEXT).context)


def bench_host(device: str, samples: int | None, trial: bool, to: Destination) -> None:
    require_gpu(device)
    if device == "cpu" and not trial:
        raise ValueError("the model is for a GPU: --device cuda, or --trial for tiny sizes")
    shape, begin = choose_shape(trial), time.perf_counter()
    count = samples or (4 if trial else SAMPLES)
    turns = 2 if trial else TURNS
    steps = WARMUP + (turns + 1) * (LEAD + WINDOW) + AFTER
    batches = [_make(shape, count, seed, device == "cuda") for seed in range(steps)]
    print(f"{time.perf_counter() - begin:.0f} s: {steps} batches", flush=True)
    with ExitStack() as stack:
        arms = {name: Arm.build(shape, tables, batches, device) for name, tables in ARMS.items()}
        for arm in arms.values():
            stack.callback(arm.pipeline.close)
        windows = take_turns(arms, turns)
        rows = [describe(name, arm, windows[name]) for name, arm in arms.items()]
    figures = compare(windows)
    for row in rows:
        print(row, flush=True)
    print(f"{time.perf_counter() - begin:.0f} s: {figures}", flush=True)
    if not trial:
        memory = {"peak_device_memory_bytes": torch.cuda.max_memory_allocated()}
        command = f"freescale bench dlrm host --device {device}"
        claims = make_claims(TARGETS, figures)
        more: dict[str, Any] = {"samples": count, "tokens": count * shape.tokens, **memory}
        write("dlrm-host", get_gpu_name(), command, rows, claims, ["triton"], to=to, **more)


@dataclass
class Arm:
    """A model with its tables somewhere, and its steps."""

    sharded: ShardedModel
    pipeline: Pipeline
    steps: Iterator[Any]
    figures: Row  # of its tables

    @staticmethod
    def build(
        shape: Shape, tables: Sequence[str], batches: Sequence[SequenceBatch], device: str
    ) -> Arm:
        torch.manual_seed(0)
        model, begin = build_model(shape, table_device="meta"), time.perf_counter()
        cache = choose_cache(model, shape, tables, batches)
        placement: dict[str, Wanted] = dict.fromkeys(TABLES, "sharded")
        placement |= {name: freescale.Host(cache) for name in tables}
        transport = LocalTransport(device, Ledger(device))
        sharded = freescale.parallelize(
            model, model.features, freescale.RowWiseAdagrad(lr=1e-6, eps=1e-8),
            transport=transport, init_std=0.02, placement=placement,
        )  # fmt: skip
        dense = AdamW(sharded.dense_parameters(), weight_decay=0.0, **ADAM)
        precision = "bf16" if device == "cuda" else "fp32"
        pipeline = Pipeline(sharded, dense, clip=1.0, precision=precision, check=False)
        sharded.tables.place(batches[0])
        wait_idle(transport.device)
        figures: Row = {"table_s": time.perf_counter() - begin}
        print(f"{figures['table_s']:.0f} s: {'; '.join(sharded.tables.describe())}", flush=True)
        for group in sharded.tables.groups:
            rows = getattr(group, "rows", None)
            if isinstance(rows, CachedStorage):
                figures |= {"cached_rows": rows.contents.slots, **fill_cache(rows)}
        return Arm(sharded, pipeline, pipeline.run(batches), figures)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            next(self.steps)


def choose_cache(
    model: nn.Module, shape: Shape, tables: Sequence[str], batches: Sequence[SequenceBatch]
) -> int:
    """Bytes of the cache of each of some tables, which lie in one cache together: a quarter more
    rows than three batches read."""
    features: Mapping[str, Sequence[str]] = model.features  # type: ignore[assignment]
    read = 0
    for table in tables:
        ids = [batch.values(name).view(-1) for batch in batches[:3] for name in features[table]]
        read += len(np.unique(torch.cat(ids)))
    row = 4 * (shape.width + 1)  # with the sum of row-wise Adagrad
    return int(ROOM * read * row) // max(1, len(tables)) + row


def take_turns(arms: Mapping[str, Arm], turns: int) -> dict[str, list[float]]:
    """Milliseconds of a step, by arm and turn. The first turn is not timed."""
    windows: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm.run(WARMUP)
    for turn in range(turns + 1):
        for name, arm in arms.items():
            device = arm.sharded.transport.device
            arm.run(LEAD)  # other arms ran while the first of these was prepared
            wait_idle(device)
            begin = time.perf_counter()
            arm.run(WINDOW)
            wait_idle(device)
            if turn:
                windows[name].append(1e3 * (time.perf_counter() - begin) / WINDOW)
    return windows


def compare(windows: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median over turns of each arm's step over that of the device in the same turn."""
    return {
        name: statistics.median(a / b for a, b in zip(own, windows["device"], strict=True))
        for name, own in windows.items()
        if name != "device"
    }


def describe(name: str, arm: Arm, windows: Sequence[float]) -> Row:
    """The figures of an arm, with its mean traffic of a step."""
    records = arm.pipeline.ledger.drain()[WARMUP:]
    counters = {
        counter: statistics.fmean(record["counters"].get(counter, 0.0) for record in records)
        for counter in COUNTERS
    }
    specs = arm.sharded.tables.specs.values()
    return {
        "arm": name,
        "rows": {spec.name: spec.rows for spec in specs},
        "table_bytes": sum(spec.rows * (spec.bytes_per_row + 4) for spec in specs),
        **arm.figures,
        "step_ms": spread(windows),
        "windows_ms": list(windows),
        **counters,
        "cache_miss_percent": 100 * counters["cache_missed"] / max(1.0, counters["cache_wanted"]),
        "peak_host_memory_bytes": read_peak_memory(),
    }


def _make(shape: Shape, samples: int, seed: int, pinned: bool) -> SequenceBatch:
    batch = make_batch(shape, draw_lengths(shape, samples, False, seed), seed)
    return batch.pin_memory() if pinned else batch
