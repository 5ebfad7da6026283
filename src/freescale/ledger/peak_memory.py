"""Peak memory of this rank."""

from __future__ import annotations

import resource
import sys

import torch


def measure_peak_memory(device: torch.device | str = "cpu") -> dict[str, int]:
    """Returns the peak bytes of this process: `host` (resident) and, with a GPU, `gpu`
    (allocated)."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if torch.device(device).type == "cuda":
        peaks["gpu"] = torch.cuda.max_memory_allocated(device)
    return peaks
