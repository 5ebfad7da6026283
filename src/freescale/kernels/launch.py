"""What all Triton twins need to launch: a GPU or the interpreter, the right current device, small
tables on the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor


def require_gpu(device: torch.device, instead: str) -> None:
    """Refuses what the kernels cannot read. Without Triton the import says so."""
    if device.type != "cuda" and not interpreted():
        raise ValueError(f"the Triton kernels need tensors on a GPU, not {device}; use {instead}")


def interpreted() -> bool:
    from freescale.kernels.triton.rows_kernels import INTERPRETED

    return INTERPRETED


def on(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def uploaded(table: np.ndarray, device: torch.device) -> Tensor:
    """A small table on the device, without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(table))
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


def blocks(items: int, each: int) -> int:
    return -(-items // each)


def power_above(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
