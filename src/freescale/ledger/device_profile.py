"""What the device does during some steps, from torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def measure_union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of [begin, end) intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total


def list_work(profiler: torch.profiler.profile) -> list[tuple[str, float, float]]:
    """The kernels and copies of a finished profile: name, begin and duration in milliseconds."""
    kineto = profiler.profiler
    assert kineto is not None and kineto.kineto_results is not None
    # labels of ranges are no work of the device
    labels = ("freescale/", "Optimizer.", "Activity Buffer", "ProfilerStep")
    return [
        (event.name(), event.start_ns() / 1e6, event.duration_ns() / 1e6)
        for event in kineto.kineto_results.events()
        if str(event.device_type()).endswith("CUDA") and event.duration_ns() > 0
        if not event.name().startswith(labels)
    ]


def is_copy(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset"))
