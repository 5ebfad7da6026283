"""The initial rows of ids on a GPU, in one pass: what `embedding.storage.draw_initial_rows` draws,
up to the last bits of a logarithm and a cosine.

In plain torch each of the twenty operations writes all entries in 64 bits: for the new ids of a
batch that is more than the batch reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.triton.launch import (
    RowLaunch,
    count_blocks,
    launch_kernel,
    require_gpu,
    use_device,
)

DRAW = RowLaunch(1024, 4)


def draw_rows(ids: Tensor, seed: Tensor, width: int, std: float) -> Tensor:
    """Rows [n, width] float32 of ids [n]; seed [1]: of the table, on the same device."""
    require_gpu(ids.device, "embedding.storage.draw_initial_rows")
    out = torch.empty(ids.numel(), width, dtype=torch.float32, device=ids.device)
    if out.numel():
        from freescale.kernels.triton.initial_rows_kernels import draw_kernel

        shape = DRAW.shape(width)
        with use_device(ids.device):
            launch_kernel(
                draw_kernel, (count_blocks(ids.numel(), shape["R"]),), ids, seed, out,
                ids.numel(), std, **shape,
            )  # fmt: skip
    return out
