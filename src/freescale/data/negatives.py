"""Draws the negatives of a sample from its key, so that they are the same on any rank."""

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
    """Draws negatives: some from the targets of other samples, the rest uniformly.

    Args:
        keys: [n] random keys of the samples.
        targets: Of the n samples, then of as many samples that follow them in the global batch
            (cyclically) as the halo needs.
        count: Negatives per sample.
        in_batch: How many of these are targets of the next `halo` samples. A sample without
            targets is replaced by a uniform draw.
        halo: Samples.
        batch_size: Of the global batch.
        num_items: Ids are below it.

    Returns:
        [n, count] item ids.
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
