"""The storage of a dynamic table on one rank: what admission, eviction and new rows cost.

Streamed ids follow a power law with a long tail: a third of a batch's different ids are new to the
table in every batch, and as many rows are evicted. Times are of the storage alone, from keys to
gathered rows; drawing the ids is not counted. Processor time, beside the clock's, tells how much of
it other work on the machine took.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.embedding.dynamic.device_directory import DeviceDirectory
from freescale.embedding.dynamic.directory import Directory
from freescale.embedding.dynamic.layout import DynamicLayout, compute_keys
from freescale.embedding.dynamic.storage import EXTRA_ROWS, DynamicStorage
from freescale.embedding.dynamic_rules import Dynamic
from freescale.embedding.layout import TableSpec
from freescale.embedding.optimizers import RowWiseAdagrad
from freescale.embedding.storage import DeviceStorage, TableRange
from freescale.ledger.ledger import Ledger
from freescale_bench.common.results import Destination, claim, write

WIDTH = {"cpu": 16, "cuda": 128}
BATCH = 100_000  # ids of a streamed batch
SETTLED = 10_000_000  # ids after which memory is read first


def make_storage(
    rows: int, evict: str, device: torch.device, where: str = "host"
) -> DynamicStorage:
    """`where`: the map of its ids."""
    rules = Dynamic(rows, evict=evict, map=where)
    spec = TableSpec("item", rules.rows, WIDTH[device.type], torch.float32, ("ids",), None, rules)
    layout = DynamicLayout((spec,), 1)
    ranges = [TableRange(spec, 0, *layout.get_owned_range(0, 0))]
    inner = DeviceStorage(ranges, layout.size + EXTRA_ROWS, RowWiseAdagrad(), device)
    shards = layout.get_owned_shards(0)
    directory: Directory | DeviceDirectory = Directory(rules, *shards)
    if where == "device":
        directory = DeviceDirectory(rules, *shards, device)
    storage = DynamicStorage(inner, directory)
    storage.initialise("item", seed=0, std=0.02)
    return storage


def draw_ids(generator: np.random.Generator, count: int) -> Tensor:
    """Of a power law over 10^15 ids."""
    drawn = generator.pareto(0.3, count) * 1000
    return torch.from_numpy(np.minimum(drawn, 1e15).astype(np.int64))


def read_resident() -> int:
    """Bytes of this process in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


def bench_stream(
    to: Destination | None, ids: int | None, rows: int | None, evict: str, device: str
) -> None:
    """Many ids through a table that is full after the first of them."""
    total, room = ids or 10**9, rows or 10**6
    torch.set_num_threads(1)
    storage = make_storage(room, evict, torch.device(device))
    held_rows = storage.spec.rows
    generator, ledger = np.random.default_rng(0), Ledger()
    figures = {"inserted": 0, "evicted": 0, "turned_away": 0}
    wall = processor = 0.0
    settled, streamed, said = 0, 0, 0
    while streamed < total:
        drawn = draw_ids(generator, BATCH)
        begin = time.perf_counter(), time.process_time()
        slots = storage.make_resident(compute_keys(drawn), ledger)
        storage.begin()
        storage.gather(slots, torch.float32)
        wall += time.perf_counter() - begin[0]
        processor += time.process_time() - begin[1]
        last = storage.last_figures
        figures = {name: value + getattr(last, name) for name, value in figures.items()}
        streamed += BATCH
        if not settled and streamed >= min(SETTLED, total // 2):
            settled = read_resident()
        if streamed * 20 // total > said:
            said = streamed * 20 // total
            print(f"{5 * said} %: {streamed / processor:,.0f} ids/s of processor time", flush=True)
    resident = read_resident()
    beside = storage.directory.nbytes / held_rows
    row: dict[str, Any] = {
        "ids": streamed,
        "batch": BATCH,
        "rows": held_rows,
        "width": WIDTH[device],
        "evict": evict,
        "ids_per_second": streamed / wall,
        "ids_per_processor_second": streamed / processor,
        "resident_bytes_settled": settled,
        "resident_bytes_end": resident,
        "bytes_beside_a_row": beside,
        **figures,
    }
    print(row)
    claims = [
        claim("ids streamed through the storage", 1e6, streamed / wall, "ids/s", at_least=True),
        claim(
            f"resident memory after {streamed:,} ids over that after {SETTLED:,}",
            1.01, resident / settled, "x", at_least=False,
        ),
        claim("memory beside rows and state", 24, beside, "bytes a row", at_least=False),
    ]  # fmt: skip
    if to is not None:
        write("dynamic", "cpu", "freescale bench dynamic", [row], claims, to=to)
