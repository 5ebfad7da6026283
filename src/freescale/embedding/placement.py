"""Sharded or replicated: decided per table before step 1. And where the rows of a sharded table are
at home: on the device, unless the user says otherwise or they do not fit.

A table is replicated when its rows and optimizer state take at most `BUDGET` bytes and either at
most `TINY` bytes or a rank's first batch reads at least `SHARE` of its rows (mean over the ranks).
That costs one AllReduce of the whole table; a sharded one costs four dependent exchanges of what is
read, and if that is a quarter of a small table, the four waits are the larger price.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from freescale.batch import SequenceBatch
from freescale.embedding.host_tables.tiers import Disk, Host, Tier, format_bytes, parse_tier
from freescale.embedding.layout import ShardLayout, TableSpec, find_feature_ids
from freescale.embedding.optimizers import RowOptimizer
from freescale.transport.api import Transport, gather_json

BUDGET = 64 << 20
TINY = 64 << 10
SHARE = 0.25

CHOICES = ("sharded", "replicated")


@dataclass(frozen=True)
class Placement:
    kind: str  # one of CHOICES
    reason: str
    tier: Tier | None = None  # of a sharded table whose rows are not at home on the device

    def __str__(self) -> str:
        where = f", {self.tier}" if self.tier is not None else ""
        return f"{self.kind}{where} ({self.reason})"


# What a user may ask for: `auto`, one of CHOICES, or a tier, also as text (`host:8GB`).
Wanted = str | Host | Disk


@dataclass(frozen=True)
class RankMemory:
    """What a rank finds on its machine before it allocates tables."""

    host: str  # names the machine
    device: str  # device of the rank; ranks with the same host and device share its memory
    free: Mapping[str, int]  # bytes, by device: the rank's own, and the CPU


def list_memory(transport: Transport) -> list[RankMemory]:
    """Of each rank. A collective."""
    # Containers of one host have limits of their own, and names of their own.
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else str(transport.rank)
    devices = {str(device): device for device in (transport.device, torch.device("cpu"))}
    free = {name: get_available_memory(device) for name, device in devices.items()}
    mine = RankMemory(f"{host}/{platform.node()}", str(transport.device), free)
    return [RankMemory(**each) for each in gather_json(transport, vars(mine))]


def find_room(ranks: list[RankMemory]) -> int:
    """Bytes that every rank can have of its device."""
    sharers = Counter((rank.host, rank.device) for rank in ranks)
    return min(rank.free[rank.device] // sharers[rank.host, rank.device] for rank in ranks)


def check_memory(
    ranks: list[RankMemory], on_device: int, on_host: int, specs: Iterable[TableSpec]
) -> None:
    """Compares what the ranks of each machine need with what it has, so that all ranks refuse
    together: ValueError if a machine has less. `on_device` and `on_host` are the bytes that each
    rank's tables take on its device, and in addition in host memory."""
    need: Counter[tuple[str, str]] = Counter()
    free: dict[tuple[str, str], int] = {}
    for rank in ranks:
        for device, size in ((rank.device, on_device), ("cpu", on_host)):
            place = rank.host, device
            need[place] += size
            free[place] = min(rank.free[device], free.get(place, 1 << 62))
    for place in sorted(need):
        if need[place] > free[place]:
            largest = max(specs, key=lambda spec: spec.rows * spec.bytes_per_row)
            what = "a machine" if place[1] == "cpu" else "a GPU"
            fix = "a disk (--placement TABLE=disk:FOLDER:CACHE)"
            if what == "a GPU":
                fix = "host memory (--placement TABLE=host:CACHE)"
            raise ValueError(
                f"the tables need {need[place] / 2**30:.1f} GiB on {what} with "
                f"{free[place] / 2**30:.1f} GiB free (the largest is "
                f"{largest.name!r}, {largest.rows:,} x {largest.width}): use more machines, a "
                f"smaller width, RowWiseAdagrad, or {fix}"
            )


def get_available_memory(device: torch.device) -> int:
    """Bytes that can still be had: on the host, also within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 1 << 62
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def count_state_bytes(optimizer: RowOptimizer, spec: TableSpec) -> int:
    """Bytes of optimizer state for each row."""
    shapes = optimizer.state_shapes(spec.width).values()
    return sum(torch.Size(shape).numel() for shape in shapes) * spec.dtype.itemsize


def choose_placement(
    spec: TableSpec, state_bytes_per_row: int, rows_read: float | None
) -> Placement:
    """Where a table lives, and why. `rows_read`: different rows in a rank's step; None: unknown."""
    total = spec.rows * (spec.bytes_per_row + state_bytes_per_row)
    size = f"{total / 2**20:.1f} MiB with its optimizer state"
    if total <= TINY:
        return Placement("replicated", f"{size}: tiny")
    if total > BUDGET:
        return Placement("sharded", f"{size}: over {BUDGET >> 20} MiB")
    if rows_read is None:
        return Placement("sharded", f"{size}, and no batch seen")
    share = rows_read / spec.rows
    kind = "replicated" if share >= SHARE else "sharded"
    return Placement(kind, f"{size}, a rank reads {share:.0%} of its rows in a step")


def parse_placement(
    wanted: Wanted | Mapping[str, Wanted], names: list[str]
) -> dict[str, Placement]:
    """The user's choice for each table that has one: `auto`, one of CHOICES or a tier, for all
    tables or by table. ValueError if there is no such table or choice."""
    mapping = dict(wanted) if isinstance(wanted, Mapping) else dict.fromkeys(names, wanted)
    placements = {}
    for name, choice in mapping.items():
        if name not in names:
            raise ValueError(f"placement names a table {name!r}; the tables are {', '.join(names)}")
        try:
            tier = parse_tier(choice) if isinstance(choice, str) else choice
        except ValueError as error:
            raise ValueError(f"placement of table {name!r}: {error}") from None
        if isinstance(tier, (Host, Disk)):
            placements[name] = Placement("sharded", "as requested", tier)
        elif choice in CHOICES:
            placements[name] = Placement(str(choice), "as requested")
        elif choice != "auto":
            raise ValueError(
                f"placement of table {name!r} must be auto, sharded, replicated, host:CACHE or "
                f"disk:FOLDER:CACHE (a CACHE is for instance 8GB), not {choice!r}"
            )
    return placements


def move_to_host(
    placements: Mapping[str, Placement],
    sizes: Mapping[str, int],
    room: int,
    fixed: Collection[str] = (),
) -> dict[str, Placement]:
    """Placements that fit onto a GPU: if those given do not, the largest sharded tables have their
    rows in host memory, and caches take half of what is left of the GPU. `sizes`: bytes of each
    table on a rank's GPU, which has `room` bytes. The user's own placements are `fixed`."""
    need = sum(sizes.values())
    if need <= room:
        return dict(placements)
    movable = [
        name
        for name, placed in placements.items()
        if placed.kind == "sharded" and placed.tier is None and name not in fixed
    ]
    moved: list[str] = []
    for name in sorted(movable, key=lambda name: (-sizes[name], name)):
        if sum(sizes[other] for other in sizes if other not in moved) <= room // 2:
            break
        moved.append(name)
    total = sum(sizes[name] for name in moved)
    left = room - (need - total)
    found = dict(placements)
    for name in moved if left > 0 else ():
        cache = left // 2 * sizes[name] // total
        reason = (
            f"tables need {format_bytes(need)} of a rank's GPU, {format_bytes(room)} are free; "
            f"this one needs {format_bytes(sizes[name])}"
        )
        found[name] = Placement("sharded", reason, Host(cache))
    return found


def place_tables(
    specs: Sequence[TableSpec],
    optimizers: Mapping[str, RowOptimizer],
    wanted: Mapping[str, Placement],
    recorded: Mapping[str, str],
    batch: SequenceBatch | None,
    transport: Transport,
) -> dict[str, Placement]:
    """Decides where each table lives. A collective. ValueError if they do not fit into the memory
    of a machine. `wanted`: the user's choices; `recorded`: kinds of an earlier run, which are kept;
    `batch`: this rank's first, None if nobody has looked at the data."""
    rows_read, placements = _count_rows_read(specs, batch, transport), {}
    for spec in specs:
        if spec.name in wanted:
            placements[spec.name] = wanted[spec.name]
        elif spec.dynamic is not None:
            placements[spec.name] = Placement("sharded", "dynamic")
        elif spec.name in recorded:
            placements[spec.name] = Placement(recorded[spec.name], "as in the checkpoint")
        else:
            state = count_state_bytes(optimizers[spec.name], spec)
            placements[spec.name] = choose_placement(spec, state, rows_read.get(spec.name))
    return _fit_memory(placements, specs, optimizers, wanted, transport)


def _count_rows_read(
    specs: Sequence[TableSpec], batch: SequenceBatch | None, transport: Transport
) -> dict[str, float]:
    """How many distinct rows of each table a rank reads, mean over ranks that have a batch."""
    mine: dict[str, int] = {}
    if batch is not None and len(batch):
        for spec in specs:
            parts = [ids.reshape(-1) for _, ids in find_feature_ids(batch, spec)]
            mine[spec.name] = torch.unique(torch.cat(parts)).numel()
    seen = [counts for counts in gather_json(transport, mine) if counts]
    if not seen:
        return {}
    return {spec.name: sum(counts[spec.name] for counts in seen) / len(seen) for spec in specs}


def _fit_memory(
    placements: dict[str, Placement],
    specs: Sequence[TableSpec],
    optimizers: Mapping[str, RowOptimizer],
    fixed: Collection[str],
    transport: Transport,
) -> dict[str, Placement]:
    """Moves tables that do not fit onto the GPUs to the host; refuses what does not fit there."""
    ranks, sizes = list_memory(transport), {}
    for spec in specs:
        parts = transport.world if placements[spec.name].kind == "sharded" else 1
        each = spec.bytes_per_row + count_state_bytes(optimizers[spec.name], spec)
        sizes[spec.name] = ShardLayout((spec,), parts).size * each
        if spec.dynamic is not None and spec.dynamic.maps_on_device:
            sizes[spec.name] += spec.dynamic.map_bytes // parts
    if transport.device.type == "cuda":
        room = find_room(ranks)
        placements = move_to_host(placements, _limit_to_caches(sizes, placements), room, fixed)
    homes = sum(sizes[name] for name, placed in placements.items() if isinstance(placed.tier, Host))
    for spec in specs:
        if spec.dynamic is not None:
            homes += spec.dynamic.counter_bytes // transport.world
            if not spec.dynamic.maps_on_device or placements[spec.name].tier is not None:
                homes += spec.dynamic.map_bytes // transport.world
    check_memory(ranks, sum(_limit_to_caches(sizes, placements).values()), homes, specs)
    return placements


def _limit_to_caches(
    sizes: Mapping[str, int], placements: Mapping[str, Placement]
) -> dict[str, int]:
    """Bytes that each table takes on the device."""
    tiers = {name: placements[name].tier for name in sizes}
    return {
        name: size if (tier := tiers[name]) is None else min(size, tier.cache_bytes)
        for name, size in sizes.items()
    }
