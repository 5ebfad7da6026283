"""What the device does during some steps, from torch's profiler: how long it is busy, how many
kernels it runs, and which of them take the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def measure_union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of [begin, end) intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total


@dataclass
class DeviceProfile:
    """Times are milliseconds of a step."""

    wall: float
    busy: float
    kernels: float
    copies: float
    slowest: list[dict[str, Any]]  # kernels by name: calls and time a step

    def describe(self) -> dict[str, float]:
        return {
            "device_busy_percent": 100 * self.busy / self.wall,
            "device_ms": self.busy,
            "kernels": self.kernels,
            "copies": self.copies,
        }


def read_profile(
    profiler: torch.profiler.profile, steps: int, wall_ms: float, top: int = 40
) -> DeviceProfile:
    """Reads the kernels and copies of a finished profile over `steps` steps."""
    events = [
        (event.name(), event.start_ns() / 1e6, event.duration_ns() / 1e6)
        for event in _list_events(profiler)
        if str(event.device_type()).endswith("CUDA") and event.duration_ns() > 0
    ]
    # labels of ranges are no work of the device
    labels = ("freescale/", "Optimizer.", "Activity Buffer", "ProfilerStep")
    events = [event for event in events if not event[0].startswith(labels)]
    moved = [e for e in events if e[0].startswith(("Memcpy", "Memset"))]
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, _, duration in events:
        by_name[name].append(duration)
    ordered = sorted(by_name.items(), key=lambda entry: -sum(entry[1]))
    return DeviceProfile(
        wall_ms / steps,
        measure_union((begin, begin + duration) for _, begin, duration in events) / steps,
        (len(events) - len(moved)) / steps,
        len(moved) / steps,
        [
            {"kernel": name[:100], "calls": len(times) / steps, "ms": sum(times) / steps}
            for name, times in ordered[:top]
        ],
    )


def _list_events(profiler: torch.profiler.profile) -> Sequence[Any]:
    kineto = profiler.profiler
    assert kineto is not None and kineto.kineto_results is not None
    return kineto.kineto_results.events()
