"""Sums of the draws of a dynamic table's ids, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.id_map.buckets import HALF, ROWS, SHARD


def add_draws(
    sums: Tensor, keys: Tensor, worth: Tensor, lowest: int, *, take_back: bool = False
) -> None:
    """Adds the worth [n] int64 of keys [n], which may repeat, to sums [shards, ROWS * buckets];
    with `take_back`, subtracts it. `lowest`: the first shard, as the keys' upper bits."""
    places = _find_places(sums, keys, lowest).view(-1)
    sums.view(-1).index_add_(0, places, worth.repeat(ROWS), alpha=-1 if take_back else 1)


def estimate_log(sums: Tensor, keys: Tensor, lowest: int) -> Tensor:
    """[n] float32: the logarithm of the least sum, at least 1, of each of keys [n]."""
    least = sums.view(-1)[_find_places(sums, keys, lowest)].amin(0)
    return least.clamp(min=1).double().log().float()


def _find_places(sums: Tensor, keys: Tensor, lowest: int) -> Tensor:
    """[ROWS, n]: the places of the sums of keys [n]."""
    buckets, low = sums.shape[1] // ROWS, (1 << HALF) - 1
    shards = (keys >> SHARD) - lowest
    parts = torch.stack([(keys >> HALF) & low, keys & low])
    rows = torch.arange(ROWS, device=keys.device)[:, None]
    return (shards * ROWS + rows) * buckets + ((parts * buckets) >> HALF)
