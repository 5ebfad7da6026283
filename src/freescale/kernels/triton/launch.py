"""What all launches of Triton kernels share: a GPU or the interpreter, the right current device,
and sizes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def require_gpu(device: torch.device, instead: str) -> None:
    """Refuses what the kernels cannot read. Without Triton the import says so."""
    if device.type != "cuda" and not is_interpreted():
        raise ValueError(f"the Triton kernels need tensors on a GPU, not {device}; use {instead}")


def is_interpreted() -> bool:
    from freescale.kernels.triton.rows_kernels import INTERPRETED

    return INTERPRETED


def use_device(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def count_blocks(items: int, each: int) -> int:
    return -(-items // each)


def round_up_to_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
