"""One batch of distinct ids on a full table: lookup and gather, with and without new ids that evict
rows, against a plain gather by slot. For both id maps: on the device and on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from freescale.embedding.dynamic.device_directory import DeviceDirectory
from freescale.embedding.dynamic.directory import Directory
from freescale.embedding.dynamic_rules import MAPS, Dynamic
from freescale.embedding.layout import DynamicLayout, TableSpec, compute_keys
from freescale.embedding.optimizers import RowWiseAdagrad
from freescale.embedding.storage.api import TableRange
from freescale.embedding.storage.device import DeviceStorage
from freescale.embedding.storage.dynamic import EXTRA_ROWS, DynamicStorage
from freescale.ledger.ledger import Ledger
from freescale_bench.common.ranks import get_gpu_name
from freescale_bench.common.results import Destination, Row, at_most, show_claims, write
from freescale_bench.common.turns import wait_idle

WIDTH = {"cpu": 16, "cuda": 128}
REPEATS = 20
WARMUP = 3  # repeats not counted
NEW_SHARE = 0.1
FULL = 0.99  # share of rows in use; hashing fills shards unevenly


def bench_batch(
    to: Destination | None, ids: int | None, rows: int | None, evict: str, device: str
) -> None:
    count, room = ids or 1_000_000, rows or 8_000_000
    if FULL * room < 5 * count:  # rows stay for three batches after their last use
        raise ValueError(f"{room:,} rows are too few for batches of {count:,} ids: give 6 batches")
    measured = [measure_map(where, count, room, evict, torch.device(device)) for where in MAPS]
    for row in measured:
        print(row)
    (mine,) = (row for row in measured if row["map"] == "device")
    static = mine["static_ms"]
    claims = [
        at_most("lookup and gather over a static gather", 1.3, mine["lookup_ms"] / static, "x"),
        at_most("the same with 10 % new ids and evictions", 2.5, mine["new_ids_ms"] / static, "x"),
        at_most("memory besides rows and state", 24, mine["bytes_beside_a_row"], "bytes a row"),
    ]
    if to is None and device == "cuda":  # CPU times of the reference kernels mean nothing
        show_claims(claims)
    elif to is not None:
        command = f"freescale bench dynamic --device {device}"
        write("dynamic", get_gpu_name() or device, command, measured, claims, ["triton"], to=to)


def measure_map(where: str, count: int, room: int, evict: str, device: torch.device) -> Row:
    """Measures a map. Returns its row, with medians in milliseconds."""
    storage, ledger = make_storage(room, evict, device, where), Ledger()
    number = fill(storage, count, ledger)
    present, fresh = storage.get_ids("item"), int(count * NEW_SHARE)
    times: dict[str, list[float]] = {"static": [], "lookup": [], "new_ids": []}
    evicted = 0
    for _ in range(REPEATS):
        order = torch.randperm(present.numel(), device=device)
        keys = compute_keys(present[order[:count]])
        slots = storage.resolve(keys, ledger).slots
        storage.begin()
        times["static"].append(_time(device, lambda: storage.gather(slots, torch.float32)))  # noqa: B023
        times["lookup"].append(_time(device, lambda: storage.read(keys, torch.float32)))  # noqa: B023
        new = torch.arange(number, number + fresh, device=device)
        number += fresh
        mixed = compute_keys(torch.cat([present[order[: count - fresh]], new]))
        mixed = mixed[torch.randperm(count, device=device)]
        times["new_ids"].append(_time(device, lambda: _use(storage, mixed, ledger)))  # noqa: B023
        evicted += storage.last_figures.evicted
        present = storage.get_ids("item")
    directory = storage.directory
    entries = directory.rows if isinstance(directory, Directory) else directory.map
    return {
        "map": where,
        "ids": count,
        "rows": storage.spec.rows,
        "width": WIDTH[device.type],
        "evict": evict,
        **{f"{name}_ms": 1e3 * statistics.median(each[WARMUP:]) for name, each in times.items()},
        "evicted_of_a_batch": evicted / REPEATS,
        "bytes_beside_a_row": entries.nbytes / storage.spec.rows,
    }


def make_storage(rows: int, evict: str, device: torch.device, where: str) -> DynamicStorage:
    """`where`: the device of its id map."""
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


def fill(storage: DynamicStorage, count: int, ledger: Ledger) -> int:
    """Inserts ids 0, 1, ... until the table is full, `count` at a time. Returns the next id."""
    number, device = 0, storage.weight.device
    while storage.directory.used < FULL * storage.spec.rows:
        batch = torch.arange(number, number + count, device=device)
        storage.resolve(compute_keys(batch), ledger)
        storage.begin()
        number += count
    return number


def _use(storage: DynamicStorage, keys: Tensor, ledger: Ledger) -> None:
    slots = storage.resolve(keys, ledger).slots
    storage.gather(slots, torch.float32)
    storage.begin()


def _time(device: torch.device, work: Callable[[], object]) -> float:
    """Returns the seconds until the device is done."""
    wait_idle(device)
    begin = time.perf_counter()
    work()
    wait_idle(device)
    return time.perf_counter() - begin
