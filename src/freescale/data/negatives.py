"""Draws negatives from keys, so that they are the same on any rank: of samples, of their positions,
or of a batch."""

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
_TOKEN, _BATCH = hash_name("negatives of a position"), hash_name("negatives of a batch")


def draw_negatives(
    keys: Tensor,
    targets: Jagged,
    *,
    count: int,
    in_batch: int,
    halo: int,
    batch_size: int,
    num_items: int,
    homes: Tensor | None = None,
) -> Tensor:
    """Draws negatives: some from the targets of other samples, the rest uniformly.

    Args:
        keys: [n] random keys: of samples, of positions or of a batch.
        targets: Of this rank's samples, then of as many samples that follow them in the global
            batch (cyclically) as the halo needs.
        count: Negatives per key.
        in_batch: How many of these are targets of the next `halo` samples. A sample without
            targets is replaced by a uniform draw.
        halo: Samples.
        batch_size: Of the global batch.
        num_items: Ids are below it.
        homes: [n] the sample of each key, among those of the targets; by default key i is of
            sample i.

    Returns:
        [n, count] item ids.
    """
    numbers = torch.arange(count)
    negatives = integers(derive(keys[:, None], _UNIFORM, numbers), num_items)  # [n, count]
    if in_batch == 0 or halo <= 0 or targets.values.numel() == 0:
        return negatives
    homes = torch.arange(len(keys)) if homes is None else homes
    numbers = numbers[:in_batch]
    step = 1 + integers(derive(keys[:, None], _SAMPLE, numbers), halo)  # [n, in_batch]
    chosen = (homes[:, None] + step) % batch_size
    lengths = targets.lengths[chosen]
    place = targets.offsets[chosen] + integers(
        derive(keys[:, None], _POSITION, numbers), lengths.clamp(min=1)
    )
    drawn = targets.values[place.clamp(max=targets.values.numel() - 1)]
    negatives[:, :in_batch] = torch.where(lengths > 0, drawn, negatives[:, :in_batch])
    return negatives


def derive_position_keys(keys: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens] keys of the positions of samples with these keys and lengths, and [tokens] samples
    that they are of."""
    homes = torch.repeat_interleave(torch.arange(len(keys)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    places = torch.arange(len(homes)) - starts[homes]
    return derive(keys[homes], _TOKEN, places), homes


def derive_batch_key(seed: int, number: int) -> Tensor:
    """[1] the key of global batch `number`."""
    return derive(seed, _BATCH, number).reshape(1)
