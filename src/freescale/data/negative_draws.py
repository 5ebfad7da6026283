"""Draws negatives from keys, so that they are the same on any rank: of samples, of their positions,
or of a batch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.batch import Jagged
from freescale.data.alias import AliasTable
from freescale.random import derive, hash_name, integers, mix_in_place

_UNIFORM, _COIN, _SAMPLE, _POSITION = (
    hash_name("uniform negative"),
    hash_name("negative or alias"),
    hash_name("negative's sample"),
    hash_name("negative's position"),
)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # of random.derive, as an unsigned number
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
    popularity: AliasTable | None = None,
) -> Tensor:
    """Draws negatives: some from the targets of other samples, the rest from the catalogue.

    Args:
        keys: [n] random keys: of samples, of positions or of a batch.
        targets: Of this rank's samples, then of as many samples that follow them in the global
            batch (cyclically) as the halo needs.
        count: Negatives per key.
        in_batch: How many of these are targets of the next `halo` samples. A sample without
            targets is replaced by a draw from the catalogue.
        halo: Samples.
        batch_size: Of the global batch.
        num_items: Ids are below it.
        homes: [n] the sample of each key, among those of the targets; by default key i is of
            sample i.
        popularity: The distribution over the catalogue; None: uniform.

    Returns:
        [n, count] item ids.
    """
    drawn = _draw_uniformly(keys.numpy(), count, num_items)  # [n, count]
    if popularity is not None:
        drawn = popularity.choose(drawn, _draw_coins(keys.numpy(), count))
    negatives = torch.from_numpy(drawn)
    if in_batch == 0 or halo <= 0 or targets.values.numel() == 0:
        return negatives
    homes = torch.arange(len(keys)) if homes is None else homes
    numbers = torch.arange(in_batch)
    step = 1 + integers(derive(keys[:, None], _SAMPLE, numbers), halo)  # [n, in_batch]
    chosen = (homes[:, None] + step) % batch_size
    lengths = targets.lengths[chosen]
    place = targets.offsets[chosen] + integers(
        derive(keys[:, None], _POSITION, numbers), lengths.clamp(min=1)
    )
    found = targets.values[place.clamp(max=targets.values.numel() - 1)]
    negatives[:, :in_batch] = torch.where(lengths > 0, found, negatives[:, :in_batch])
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


def _draw_uniformly(keys: NDArray[np.int64], count: int, bound: int) -> NDArray[np.int64]:
    """integers(derive(keys[:, None], _UNIFORM, arange(count)), bound)."""
    drawn = _draw_bits(keys, _UNIFORM, count)
    drawn >>= np.uint64(1)
    # a division by one number is many times faster than the remainder, for numpy
    quotient = np.floor_divide(drawn, np.uint64(bound))
    quotient *= np.uint64(bound)
    drawn -= quotient
    return drawn.view(np.int64)


def _draw_coins(keys: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """uniform(derive(keys[:, None], _COIN, arange(count)))."""
    drawn = _draw_bits(keys, _COIN, count)
    drawn >>= np.uint64(11)
    coins = drawn.astype(np.float64)
    coins *= 2.0**-53
    return coins


def _draw_bits(keys: NDArray[np.int64], name: int, count: int) -> NDArray[np.uint64]:
    """derive(keys[:, None], name, arange(count)), in place in one array: the negatives are most of
    what a batch draws."""
    base = derive(torch.from_numpy(keys), name).numpy().view(np.uint64)
    drawn: NDArray[np.uint64] = np.add.outer(
        base * _GOLDEN, np.arange(1, count + 1, dtype=np.uint64)
    )
    mix_in_place(drawn)
    return drawn
