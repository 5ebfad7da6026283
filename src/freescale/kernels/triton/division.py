"""Tags of rows that are divided, on a GPU: the twin of `reference.division`, by a launch for each
list where that takes five, and several for all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.reference.division import MarkedRows, find_first_tags
from freescale.kernels.triton.launch import count_blocks, launch_kernel, require_gpu, use_device
from freescale.kernels.upload import upload

BLOCK = 512  # rows of a program
WARPS = 4
_LIMIT = 2**31 - 1


def tag_rows(lists: Sequence[MarkedRows]) -> Tensor:
    """As `reference.division.tag_rows`."""
    from freescale.kernels.triton.division_kernels import tag_kernel

    device, sizes = lists[0].rows.device, [one.rows.numel() for one in lists]
    require_gpu(device, "kernels.reference.division")
    for one in lists:
        assert one.rows.dtype == torch.int64 and one.marked.dtype == torch.bool
        assert one.rows.is_contiguous() and one.marked.is_contiguous()
    first = find_first_tags(lists)
    if max(sum(sizes), first[-1]) > _LIMIT:
        raise ValueError(f"up to {_LIMIT} rows and parts of them can be told apart")
    bounds = [np.concatenate([[0], np.cumsum(np.asarray(one.sizes, np.int64))]) for one in lists]
    begins = np.cumsum([0] + [len(each) for each in bounds])
    table = upload(np.concatenate(bounds).astype(np.int32), device)
    tags = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    with use_device(device):
        for number, (one, part) in enumerate(zip(lists, torch.split(tags, sizes), strict=True)):
            if not part.numel():
                continue
            ranks = len(one.sizes)
            launch_kernel(
                tag_kernel, (count_blocks(part.numel(), BLOCK),), part, one.marked.view(torch.int8),
                one.rows, table[int(begins[number]) :], part.numel(), first[number], ranks,
                one.pieces, ranks.bit_length(), BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
    return tags
