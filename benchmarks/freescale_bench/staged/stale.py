"""The negative control of the staged schedule: staged without handling collisions."""

from __future__ import annotations

import torch
from torch import Tensor


def no_collisions(current: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces `collision_masks`: no row is shared, so no row waits.

    Every row of the next batch is then fetched while this one computes, before its update, so rows
    that both read are one step stale. All gradients are deferred, and still applied once each. The
    control shows what exactness costs in time. The tests must tell it from the serial schedule.
    """
    return torch.zeros_like(current, dtype=torch.bool), torch.zeros_like(
        following, dtype=torch.bool
    )
