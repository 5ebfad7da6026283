"""How long a device is busy, how many kernels it runs, and which of them take the time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from freescale.train.device_figures import is_copy, list_work, measure_union


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
    events = list_work(profiler)
    moved = [event for event in events if is_copy(event[0])]
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
