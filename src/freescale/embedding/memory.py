"""Whether the tables fit into the memory of the machines, before they are allocated."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from freescale.embedding.layout import TableSpec
from freescale.transport.api import Transport


def check_memory(need: int, specs: Iterable[TableSpec], transport: Transport) -> None:
    """Compares what the ranks of each machine need with what it has, so that all ranks refuse
    together. A collective.

    Args:
        need: bytes of this rank's rows and their optimizer state.
        specs: all tables, for the message.

    Raises:
        ValueError: a machine has less than its ranks need.
    """
    # Containers of one host have limits of their own, and names of their own.
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else transport.rank
    machine = f"{host}/{platform.node()}/{transport.device}"
    mine = {"machine": machine, "need": need, "free": get_available_memory(transport.device)}
    parts = transport.gather_bytes(json.dumps(mine).encode())
    everyone = [json.loads(part) for part in parts]
    for machine in sorted({one["machine"] for one in everyone}):
        here = [one for one in everyone if one["machine"] == machine]
        total, free = sum(one["need"] for one in here), min(one["free"] for one in here)
        if total > free:
            largest = max(specs, key=lambda spec: spec.rows * spec.bytes_per_row)
            raise ValueError(
                f"the tables need {total / 2**30:.1f} GiB on a machine with "
                f"{free / 2**30:.1f} GiB free (the largest is "
                f"{largest.name!r}, {largest.rows:,} x {largest.width}): use more machines, a "
                "smaller width, or RowWiseAdagrad"
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
