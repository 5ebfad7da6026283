"""Uploads small tables from the host to the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(table: np.ndarray, device: torch.device) -> Tensor:
    """Copies a small table to the device without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(table))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
