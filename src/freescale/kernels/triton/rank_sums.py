"""Sums of what several ranks have sent, on a GPU: the twin of `reference.rank_sums`, with its bits,
by one launch where that takes one for each rank. They are made beside a backward, by a thread whose
every launch takes the interpreter from the one that launches it."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.triton.launch import count_blocks, launch_kernel, require_gpu, use_device

DTYPES = (torch.float32, torch.float64)  # what torch adds without a wider type in between
BLOCK = 1024  # numbers of a program


def sum_in_order(parts: Tensor, copies: int) -> Tensor:
    """As `reference.rank_sums.sum_in_order`."""
    from freescale.kernels.triton.rank_sums_kernels import sum_in_order_kernel

    require_gpu(parts.device, "kernels.reference.rank_sums")
    assert parts.dtype in DTYPES and parts.is_contiguous()
    ranks, count = parts.shape
    total = torch.empty(copies * count, dtype=parts.dtype, device=parts.device)
    if total.numel():
        with use_device(parts.device):
            launch_kernel(
                sum_in_order_kernel, (count_blocks(count, BLOCK),), parts, total, count, ranks,
                copies, BLOCK=BLOCK,
            )  # fmt: skip
    return total
