"""Negatives of a sample: drawn from its key, so that they are the same on any rank and travel with
it."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.batch import Jagged
from freescale.random import derive, hash_name, integers

_UNIFORM, _SAMPLE, _POSITION = (
    hash_name("uniform negative"),
    hash_name("negative's sample"),
    hash_name("negative's position"),
)


def draw_negatives(
    keys: Tensor,
    targets: Jagged,
    *,
    count: int,
    in_batch: int,
    halo: int,
    batch_size: int,
    num_items: int,
) -> Tensor:
    """[n] keys -> [n, count] item ids: `in_batch` from the targets of the next `halo` samples, the
    rest uniform.

    targets: those of the n samples themselves, then of the samples that follow in the global batch
    of `batch_size` (cyclically), as many as the halo needs. A chosen sample without targets gives
    way to a uniform draw.
    """
    numbers = torch.arange(count)
    negatives = integers(derive(keys[:, None], _UNIFORM, numbers), num_items)  # [n, count]
    halo = min(halo, batch_size - 1)  # a sample is never in its own halo
    if in_batch == 0 or halo <= 0 or targets.values.numel() == 0:
        return negatives
    numbers = numbers[:in_batch]
    step = 1 + integers(derive(keys[:, None], _SAMPLE, numbers), halo)  # [n, in_batch]
    chosen = (torch.arange(len(keys))[:, None] + step) % batch_size
    lengths = targets.lengths[chosen]
    place = targets.offsets[chosen] + integers(
        derive(keys[:, None], _POSITION, numbers), lengths.clamp(min=1)
    )
    drawn = targets.values[place.clamp(max=targets.values.numel() - 1)]
    negatives[:, :in_batch] = torch.where(lengths > 0, drawn, negatives[:, :in_batch])
    return negatives
