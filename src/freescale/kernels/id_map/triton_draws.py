"""Sums of draws as Triton kernels, for NVIDIA GPUs: the functions of `draws.reference`.

Each takes two launches at most, where plain torch takes thirty. They run while a step computes, in
a thread whose every launch takes the interpreter's lock from the thread that launches the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freescale.kernels.id_map.buckets import ROWS
from freescale.kernels.jit.launch import KernelModule, launch_blocks, require_gpu

BLOCK = 256  # keys of a program
_kernels = KernelModule("freescale.kernels.id_map.triton_draws_kernels")


def add_draws(
    sums: Tensor, keys: Tensor, worth: Tensor, lowest: int, *, take_back: bool = False
) -> None:
    """As the reference. Sums of integers do not depend on the order of the additions."""
    assert worth.dtype == torch.int64 and worth.is_contiguous()
    _launch("add_draws_kernel", sums, keys, worth, lowest, SIGN=-1 if take_back else 1)


def estimate_log(sums: Tensor, keys: Tensor, lowest: int) -> Tensor:
    """As the reference, up to the last bit of a logarithm."""
    found = torch.empty(keys.numel(), dtype=torch.float32, device=keys.device)
    _launch("estimate_log_kernel", sums, keys, found, lowest)
    return found


def _launch(
    kernel: str, sums: Tensor, keys: Tensor, other: Tensor, lowest: int, **options: Any
) -> None:
    require_gpu(sums.device, "kernels.id_map.reference")
    assert sums.is_contiguous() and keys.dtype == torch.int64 and keys.is_contiguous()
    launch_blocks(
        getattr(_kernels, kernel), sums.device, keys.numel(), BLOCK, sums, keys, other,
        keys.numel(), lowest, BUCKETS=sums.shape[1] // ROWS, BLOCK=BLOCK, **options,
    )  # fmt: skip
