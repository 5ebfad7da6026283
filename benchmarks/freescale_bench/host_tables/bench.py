"""Trains a shape of `freescale bench train` with its item table on the device, in host memory and
on a disk, and compares the steps.

Each place gets a new table after the previous one is freed: the memory of the host or the GPU needs
to hold only one. Before the timed steps the cache is filled with random rows, as if earlier batches
had trained them. From then on every fetched row evicts another, which is written back. Batches are
prepared in advance and are the same in every place. Windows of steps are compared pairwise.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from freescale.batch import SequenceBatch
from freescale.config import RunConfig
from freescale.data.batches.loader import Histories
from freescale.embedding.storage.cached import CachedStorage
from freescale.transport.api import Transport
from freescale_bench.common.ranks import gather_json, get_gpu_name, open_rank
from freescale_bench.common.results import (
    Destination,
    Row,
    Target,
    make_claims,
    show_claims,
    spread,
    write,
)
from freescale_bench.common.turns import read_peak_memory, read_resident_memory, wait_idle
from freescale_bench.host_tables.setting import COUNTERS, Setting
from freescale_bench.train.trained import Trained, list_batches, prepare

POPULARITIES = {"zipf": 1.0, "uniform": None}
SPANS = ("arrive", "make resident", "ahead/make resident", "compute", "await batch")
MAIN_THREAD = "steps_that_miss_on_the_main_thread"
TABLE_SECONDS = 120.0
LIMIT = 600.0  # seconds: limit of a collective; ranks create their tables at the same time

TARGETS = [
    Target("zipf host", "ids by Zipf's law: step with the table in host memory over on the device",
          1.02, "x", at_least=False),
    Target("uniform host", "every row a miss: step, table in host memory over on the device",
          1.05, "x", at_least=False),
    Target("misses on the main thread", "timed steps in which the main thread fetched rows itself",
          0, "", at_least=False),
    Target("uniform miss percent", "every row a miss: rows that were not in the cache", 99, "%"),
    Target("table seconds", "creating the table in host memory", TABLE_SECONDS, "s",
          at_least=False),
]  # fmt: skip


class Bench:
    """One rank of the benchmark."""

    def __init__(self, setting: Setting, transport: Transport, folder: Path) -> None:
        """Prepares the data, written by rank 0. A collective."""
        self.setting, self.transport = setting, transport
        shape = setting.make_shape()
        self.configs: dict[str, RunConfig] = {}
        self.data: dict[str, Histories] = {}
        self.batches: dict[str, list[SequenceBatch]] = {}
        for name, power in POPULARITIES.items():
            items = {"num_items": setting.items}
            config, data = prepare(
                shape, folder, transport, data=items, train={}, name=name, popularity=power
            )
            self.configs[name], self.data[name] = config, data
            self.batches[name] = list_batches(data, setting.steps, setting.device)
        self.say("data", f"{setting.items:,} items")

    def say(self, what: str, text: str) -> None:
        if self.transport.rank == 0:
            print(f"{time.perf_counter() - BEGIN:.0f} s: {what}: {text}", flush=True)

    def measure(self) -> list[Row]:
        """Returns a row per popularity and place, the same on every rank."""
        rows = []
        for arm, placement in self.setting.list_placements().items():
            for popularity, mine in self._measure_place(placement):
                ranks = gather_json(self.transport, mine)
                rows.append(join_ranks(f"{popularity} {arm}", ranks, self.setting.items))
                self.say(f"{popularity} {arm}", json.dumps(rows[-1]))
        return rows

    def _measure_place(self, placement: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the figures of this rank, by popularity."""
        gc.collect()  # the previous table
        if self.setting.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.say("free", f"{torch.cuda.mem_get_info()[0] / 1e9:.1f} GB of the GPU")
        first = next(iter(self.configs))
        config = self.configs[first]
        config = replace(config, train=replace(config.train, placement=f"item={placement}"))
        begin = time.perf_counter()
        trained = Trained.build(config, self.data[first], self.transport)
        model = trained.model
        model.tables.place(self.batches[first][0])
        wait_idle(self.transport.device)
        made = time.perf_counter() - begin
        self.say("tables", f"{made:.1f} s: {'; '.join(model.tables.describe())}")
        try:
            for name, batches in self.batches.items():
                yield name, {"table_s": made, **self._measure_ids(batches, trained)}
        finally:
            trained.pipeline.close()

    def _measure_ids(self, batches: list[SequenceBatch], trained: Trained) -> dict[str, Any]:
        model = trained.model
        rows = model.tables.get_group("item").rows
        filled = fill_cache(rows) if isinstance(rows, CachedStorage) else {}
        windows, records = trained.time_windows(batches, self.setting.steps)
        spans = [(name, end - start) for record in records for name, start, end in record["spans"]]
        figures: dict[str, Any] = {
            "windows_ms": windows,
            "spans_ms": {
                name: sum(span for other, span in spans if other == name) / 1e6 / len(records)
                for name in SPANS
            },
            MAIN_THREAD: sum(name == "make resident" for name, _ in spans),
            "resident_memory_bytes": read_resident_memory(),
            "peak_memory_bytes": read_peak_memory(),
            **{
                name: sum(record["counters"].get(name, 0.0) for record in records) / len(records)
                for name in COUNTERS
            },
            **filled,
        }
        if isinstance(rows, CachedStorage):
            figures["full"] = rows.contents.filled == rows.contents.slots
        if self.setting.device == "cuda":
            figures["device_memory_bytes"] = torch.cuda.max_memory_allocated()
        return figures


BEGIN = time.perf_counter()


class _NoLedger:
    """A ledger that records nothing, for work outside steps."""

    def span(self, name: str) -> nullcontext[None]:
        return nullcontext()

    def count(self, name: str, value: float) -> None:
        pass


def fill_cache(rows: CachedStorage) -> dict[str, float]:
    """Fills a cache with random rows, in several batches. Returns the speed of row transfers
    without other work."""
    slots, moved, device = rows.contents.slots, 0, rows.weight.device
    order = torch.randperm(rows.size, generator=torch.Generator().manual_seed(0))[:slots]
    order = order.to(device)
    wait_idle(device)
    begin = time.perf_counter()
    for part in torch.split(order, max(1, slots // 4)):
        rows.resolve(part, _NoLedger())
        moved += rows.traffic.bytes_up + rows.traffic.bytes_down
    wait_idle(device)
    seconds = time.perf_counter() - begin
    for _ in range(3):  # the rows of three batches cannot be evicted
        rows.resolve(order[:1], _NoLedger())
    return {"fill_s": seconds, "fill_bytes_per_s": moved / seconds}


def join_ranks(arm: str, ranks: list[dict[str, Any]], items: int) -> Row:
    """Merges the ranks' figures into the row of an arm: all windows, sums of counters, the largest
    memory."""
    row: Row = {"arm": arm, "rows": items, "ranks": len(ranks)}
    row["windows_ms"] = [value for rank in ranks for value in rank["windows_ms"]]
    row["step_ms"] = spread(row["windows_ms"])
    row |= {name: sum(rank[name] for rank in ranks) for name in COUNTERS}
    row["cache_miss_percent"] = 100 * row["cache_missed"] / max(1, row["cache_wanted"])
    row["spans_ms"] = {
        name: sum(rank["spans_ms"][name] for rank in ranks) / len(ranks) for name in SPANS
    }
    row[MAIN_THREAD] = sum(rank[MAIN_THREAD] for rank in ranks)
    for name in ("table_s", "fill_s", "resident_memory_bytes", "peak_memory_bytes",
                 "device_memory_bytes"):  # fmt: skip
        if name in ranks[0]:
            row[name] = max(rank[name] for rank in ranks)
    if "full" in ranks[0]:
        row["cache_was_full"] = all(rank["full"] for rank in ranks)
        row["fill_bytes_per_s"] = sum(rank["fill_bytes_per_s"] for rank in ranks)
    return row


def collect_figures(rows: list[Row]) -> Mapping[str, float]:
    """Step time over that of the table on the device, paired by window, and the other figures of
    claims."""
    by_arm = {row["arm"]: row for row in rows}
    cached = [row for row in rows if "cache_was_full" in row]
    figures: dict[str, float] = {}
    for row in cached:
        device = by_arm[f"{row['arm'].split()[0]} device"]
        pairs = zip(row["windows_ms"], device["windows_ms"], strict=True)
        figures[row["arm"]] = statistics.median(mine / other for mine, other in pairs)
    figures["misses on the main thread"] = float(sum(row[MAIN_THREAD] for row in cached))
    figures["uniform miss percent"] = by_arm["uniform host"]["cache_miss_percent"]
    figures["table seconds"] = by_arm["uniform host"]["table_s"]
    return figures


def bench_host_tables(setting: Setting, to: Destination) -> None:
    with open_rank(setting.device, LIMIT) as (transport, folder):
        rows = Bench(setting, transport, folder).measure()
    if transport.rank == 0:
        claims = make_claims(TARGETS, collect_figures(rows))
        ranks = f"{transport.world}ranks-" if transport.world > 1 else ""
        command = f"freescale bench host_tables {' '.join(setting.as_arguments())}"
        if setting.keep:
            name = f"{ranks}{get_gpu_name() or 'cpu'}"
            write("host_tables", name, command, rows, claims, ["triton"], to=to)
        else:
            show_claims(claims)
