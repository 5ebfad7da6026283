"""Whether the tables fit into the memory of the machines, before they are allocated."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from freescale.embedding.layout import TableSpec
from freescale.transport.api import Transport, gather_json


@dataclass(frozen=True)
class RankMemory:
    """What a rank finds on its machine before it allocates tables."""

    host: str  # names the machine
    device: str  # of the rank; ranks with the same host and device share its memory
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
    together: a ValueError if a machine has less, with a message about `specs`, all tables.
    `on_device` and `on_host` are the bytes that each rank's tables take on its device, and in
    addition in host memory."""
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
    """Bytes that can still be had on this device: on the host, the smaller of free memory and the
    container's limit."""
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
