"""Compares the clocks of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

_PINGS = 8


def measure_clock_offsets(
    group: dist.ProcessGroup, gather: Callable[[bytes], list[bytes]]
) -> tuple[list[int], list[int]]:
    """Ranks of one machine share its monotonic clock; others ping rank 0 in turn and keep the
    quickest answer. A collective.

    Args:
        group: of gloo.
        gather: exchanges control messages, as `Transport.gather_bytes` does.

    Returns:
        ([world] what to add to a rank's clock to get rank 0's, [world] the uncertainty of it), in
        nanoseconds.
    """
    own, world = dist.get_rank(group), dist.get_world_size(group)
    boot = Path("/proc/sys/kernel/random/boot_id")
    machines = gather(boot.read_bytes() if boot.exists() else b"?%d" % own)
    offsets, residuals = [0] * world, [0] * world
    for rank in range(1, world):
        if machines[rank] == machines[0]:
            continue
        shared = torch.tensor(_ping(group, own, rank), dtype=torch.int64)
        dist.broadcast(shared, group_src=rank, group=group)
        offsets[rank], residuals[rank] = shared.tolist()
    return offsets, residuals


def _ping(group: dist.ProcessGroup, own: int, rank: int) -> tuple[int, int]:
    """On `rank`: (its offset to rank 0, half the round trip). Rank 0 answers, the others do
    nothing."""
    clock = torch.zeros(1, dtype=torch.int64)
    best = (0, 1 << 62)
    for _ in range(_PINGS):
        if own == 0:
            dist.recv(clock, group_src=rank, group=group)
            clock[0] = time.perf_counter_ns()
            dist.send(clock, group_dst=rank, group=group)
        elif own == rank:
            begin = time.perf_counter_ns()
            dist.send(clock, group_dst=0, group=group)
            dist.recv(clock, group_src=0, group=group)
            end = time.perf_counter_ns()
            answer = (int(clock) - (begin + end) // 2, (end - begin) // 2)
            best = min(best, answer, key=lambda pair: pair[1])
    return best
