"""Which rows two consecutive batches share, found by their owner. Pure functions of the rows asked for: the size of the table does
not matter.

A row of batch i+1 that batch i reads too must wait for i's update (it collides). A row of batch i that batch i+1 reads too must be
updated first (it is shared). Whether a row is one or the other is the same for every rank that asked for it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def collision_masks(current: Tensor, coming: Tensor) -> tuple[Tensor, Tensor]:
    """Rows asked of this owner by batch i [r] and by batch i+1 [s], repeats included.

    -> (shared [r]: which of i's requests batch i+1 makes too, colliding [s]: which of i+1's requests batch i makes too), bool.
    """
    if not current.numel() or not coming.numel():
        return torch.zeros_like(current, dtype=torch.bool), torch.zeros_like(coming, dtype=torch.bool)
    now, now_of = torch.unique(current, return_inverse=True)
    next_, next_of = torch.unique(coming, return_inverse=True)
    place = torch.searchsorted(now, next_).clamp_(max=now.numel() - 1)
    both = now[place] == next_  # [unique rows of i+1]
    shared = torch.zeros_like(now, dtype=torch.bool)
    shared[place[both]] = True
    return shared[now_of], both[next_of]


def counts_per_rank(mask: Tensor, sizes: list[int]) -> Tensor:
    """mask [sum(sizes)] in rank order -> how many are set in each rank's part [ranks]."""
    ends = torch.cumsum(torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.long()]), 0)
    edges = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], device=mask.device)
    return torch.diff(ends[edges])
