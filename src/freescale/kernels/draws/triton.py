"""Sums of what ids are worth as draws, on a GPU: the twin of `reference.draws`, by two launches
where that takes thirty. They are made while a step computes, by a thread whose every launch takes
the interpreter from the one that launches the step."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.draws.buckets import ROWS
from freescale.kernels.jit.launch import count_blocks, launch_kernel, require_gpu, use_device

BLOCK = 256  # keys of a program


def add_draws(
    sums: Tensor, keys: Tensor, worth: Tensor, lowest: int, *, take_back: bool = False
) -> None:
    """As `reference.draws.add_draws`: integers, the same in whatever order they are added."""
    from freescale.kernels.draws.triton_kernels import add_draws_kernel

    assert worth.dtype == torch.int64 and worth.is_contiguous()
    _launch(add_draws_kernel, sums, keys, worth, lowest, SIGN=-1 if take_back else 1)


def estimate_log(sums: Tensor, keys: Tensor, lowest: int) -> Tensor:
    """As `reference.draws.estimate_log`, up to the last bit of a logarithm."""
    from freescale.kernels.draws.triton_kernels import estimate_log_kernel

    found = torch.empty(keys.numel(), dtype=torch.float32, device=keys.device)
    _launch(estimate_log_kernel, sums, keys, found, lowest)
    return found


def _launch(
    kernel: object, sums: Tensor, keys: Tensor, other: Tensor, lowest: int, **options: int
) -> None:
    require_gpu(sums.device, "kernels.draws.reference")
    assert sums.is_contiguous() and keys.dtype == torch.int64 and keys.is_contiguous()
    if not keys.numel():
        return
    with use_device(sums.device):
        launch_kernel(
            kernel, (count_blocks(keys.numel(), BLOCK),), sums, keys, other, keys.numel(),
            lowest, BUCKETS=sums.shape[1] // ROWS, BLOCK=BLOCK, **options,
        )  # fmt: skip
