"""Trains a shape of `freescale bench train` with its item table on the device, in host memory and
on a disk, one after another, and compares the steps.

Before the steps that are timed the cache is filled with rows that no batch reads next, so that from
then on every row that is brought makes another one leave. Under torchrun every rank has a table of
the given size, and the result is named after the number of ranks.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from freescale.bench.common.results import Asked, Destination, Row, make_claims, write
from freescale.bench.common.spread import spread
from freescale.bench.common.turns import read_peak_memory
from freescale.bench.train.files import write_interactions
from freescale.bench.train.measure import build_config
from freescale.bench.train.shapes import SHAPES
from freescale.config import RunConfig
from freescale.data.workers import read_ahead
from freescale.embedding.host_tables.storage import CachedStorage
from freescale.embedding.sharded_model import ShardedModel
from freescale.ledger.machine import get_gpu_name
from freescale.pipeline.pipeline import Pipeline
from freescale.train.build import (
    build_model,
    build_optimizer,
    build_pipeline,
    count_workers,
    load_histories,
    prepare_data,
)
from freescale.transport.api import Transport
from freescale.transport.connect import connect

WARMUP = 20  # steps, once the cache is full
WINDOW = 10  # steps that are timed together
POPULARITIES = {"zipf": 1.0, "uniform": 0.0}

ASKED = [
    Asked("zipf host", "ids by Zipf's law: step with the table in host memory over on the device",
          1.02, "x", at_least=False),
    Asked("uniform host", "uniform ids: step with the table in host memory over on the device",
          1.05, "x", at_least=False),
    Asked("misses on the main thread", "timed steps in which the main thread brought rows itself",
          0, "", at_least=False),
]  # fmt: skip


@dataclass(frozen=True)
class Setting:
    shape: str  # of `freescale bench train`
    device: str
    size: int  # bytes of rows and state on each rank
    cache: int  # bytes
    steps: int  # that are timed
    disk: str | None  # a folder
    keep: bool  # the result is written

    def list_placements(self) -> dict[str, str]:
        arms = {"device": "sharded", "host": f"host:{self.cache}"}
        return arms | ({"disk": f"disk:{self.disk}:{self.cache}"} if self.disk else {})


def measure_arm(
    setting: Setting, config: RunConfig, histories: Path, transport: Transport
) -> dict[str, Any]:
    """The figures of this rank."""
    begin = time.perf_counter()
    data = load_histories(config, histories, transport)
    model = build_model(config, data, transport)
    pipeline = build_pipeline(config, model, build_optimizer(config, model), 10**6)
    model.tables.place(data.batch(0))
    wait(setting.device)
    made = time.perf_counter() - begin
    fill_cache(model)
    workers = count_workers(config, setting.device)
    with read_ahead(data, workers, pin=setting.device == "cuda") as batches:
        windows, records = time_steps(pipeline, batches, setting)
    rows = model.tables.get_group("item").rows
    counters = {
        name: sum(record["counters"].get(name, 0.0) for record in records) / len(records)
        for name in ("cache_wanted", "cache_missed", "cache_bytes_up", "cache_bytes_down")
    }
    spans = [(name, end - start) for record in records for name, start, end in record["spans"]]
    figures: dict[str, Any] = {
        "windows_ms": windows,
        "table_s": made,
        "spans_ms": {
            name: sum(time for other, time in spans if other == name) / 1e6 / len(records)
            for name in ("arrive", "make resident", "ahead/make resident")
        },
        "steps_that_miss_on_the_main_thread": sum(name == "make resident" for name, _ in spans),
        "resident_memory_bytes": read_peak_memory(),
        **counters,
    }
    if isinstance(rows, CachedStorage):
        figures["full"] = rows.contents.filled == rows.contents.slots
    if setting.device == "cuda":
        figures["device_memory_bytes"] = torch.cuda.max_memory_allocated()
    pipeline.close()
    return figures


def fill_cache(model: ShardedModel) -> None:
    """Makes the last rows resident, some at a time as batches would."""
    rows = model.tables.get_group("item").rows
    if isinstance(rows, CachedStorage):
        slots, device = rows.contents.slots, rows.weight.device
        size, step = rows.contents.slot_of.size, max(1, slots // 4)
        for start in range(size - slots, size, step):
            chosen = torch.arange(start, min(start + step, size), device=device)
            rows.make_resident(chosen, model.transport.ledger)


def time_steps(
    pipeline: Pipeline, batches: Iterator[Any], setting: Setting
) -> tuple[list[float], list[dict[str, Any]]]:
    """Milliseconds of a step in each window, and the ledger's records of the steps."""
    windows, records, begin = [], [], 0.0
    for result in pipeline.run(batches):
        timed = result.step - WARMUP
        if timed >= 0 and timed % WINDOW == 0:
            wait(setting.device)
            if timed:
                windows.append(1e3 * (time.perf_counter() - begin) / WINDOW)
            drained = pipeline.ledger.drain()
            records += drained if timed else []
            begin = time.perf_counter()
        if timed >= setting.steps:
            break
    return windows, records


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(setting: Setting, transport: Transport, folder: Path) -> list[Row]:
    """A row for each popularity and placement; the same on every rank."""
    shape, rows = SHAPES[setting.shape], []
    items = setting.size * transport.world // (shape.width * 4 * 3)  # Adam has two numbers beside
    batches = (WARMUP + setting.steps) // 2
    shape = replace(
        shape, items=items - 1, batches=batches, samples=shape.samples * transport.world, users=0
    )
    for popularity, power in POPULARITIES.items():
        file = folder / f"{popularity}.parquet"
        if transport.rank == 0:
            write_interactions(shape, file, popularity=power)
        transport.gather_bytes(b"")
        config = build_config(shape, file, folder / "cache", setting.device, 10**6)
        config = replace(config, data=replace(config.data, num_items=items))
        histories = prepare_data(config)
        for arm, placement in setting.list_placements().items():
            train = replace(config.train, placement=f"item={placement}")
            gc.collect()
            if setting.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            mine = measure_arm(setting, replace(config, train=train), histories, transport)
            parts = transport.gather_bytes(json.dumps(mine).encode())
            rows.append(
                join_ranks(f"{popularity} {arm}", [json.loads(part) for part in parts], items)
            )
            if transport.rank == 0:
                print(json.dumps(rows[-1]), flush=True)
    return rows


def join_ranks(arm: str, ranks: list[dict[str, Any]], items: int) -> Row:
    """The row of an arm: the windows of all ranks, sums of counters and the largest memory."""
    row: Row = {"arm": arm, "rows": items, "ranks": len(ranks)}
    row["step_ms"] = spread([value for rank in ranks for value in rank["windows_ms"]])
    sums = ("cache_wanted", "cache_missed", "cache_bytes_up", "cache_bytes_down")
    row |= {name: sum(rank[name] for rank in ranks) for name in sums}
    row["cache_miss_percent"] = 100 * row["cache_missed"] / max(1, row["cache_wanted"])
    row["spans_ms"] = {
        name: sum(rank["spans_ms"][name] for rank in ranks) / len(ranks)
        for name in ranks[0]["spans_ms"]
    }
    missing = "steps_that_miss_on_the_main_thread"
    row[missing] = sum(rank[missing] for rank in ranks)
    for name in ("table_s", "resident_memory_bytes", "device_memory_bytes"):
        if name in ranks[0]:
            row[name] = max(rank[name] for rank in ranks)
    if "full" in ranks[0]:
        row["cache_was_full"] = all(rank["full"] for rank in ranks)
    return row


def collect_figures(rows: list[Row]) -> Mapping[str, float]:
    """Steps over those of the same ids with the table on the device."""
    medians = {row["arm"]: row["step_ms"]["median"] for row in rows}
    figures = {
        arm: median / medians[f"{arm.split()[0]} device"]
        for arm, median in medians.items()
        if not arm.endswith("device")
    }
    figures["misses on the main thread"] = float(
        sum(row["steps_that_miss_on_the_main_thread"] for row in rows if "cache_was_full" in row)
    )
    return figures


def bench_host_tables(setting: Setting, to: Destination) -> None:
    if setting.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU here; try the benchmark with --device cpu --size 200MB")
    transport = connect(setting.device)
    with tempfile.TemporaryDirectory() as temporary:
        # rank 0's, which all ranks of the machine read
        folder = Path(transport.gather_bytes(temporary.encode())[0].decode())
        rows = measure(setting, transport, folder)
        transport.gather_bytes(b"")
    if transport.rank == 0:
        figures = collect_figures(rows)
        claims = make_claims(ASKED, figures)
        print(json.dumps(figures))
        if setting.keep:
            ranks = f"{transport.world}ranks-" if transport.world > 1 else ""
            write(
                "host_tables",
                f"{ranks}{get_gpu_name() or 'cpu'}",
                f"freescale bench host_tables --device {setting.device} --size {setting.size} "
                f"--cache {setting.cache} --shape {setting.shape}",
                rows,
                claims,
                ["triton"],
                to=to,
            )
    transport.close()
