"""Draws negatives from keys, so that they are the same on any rank: of samples, of their positions,
or of a batch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.batch import Jagged
from freescale.data.batches.alias import AliasTable
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
    num_items: int | None,
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
        num_items: Ids are below it. None: there is no catalogue; all negatives are targets of
            those of the next `halo` samples that have some.
        homes: [n] the sample of each key, among those of the targets; by default key i is of
            sample i.
        popularity: The distribution over the catalogue; None: uniform.

    Returns:
        [n, count] item ids.
    """
    homes = torch.arange(len(keys)) if homes is None else homes
    if num_items is None:
        return _draw_targets(keys, targets, count, halo, batch_size, homes)
    drawn = _draw_uniformly(keys.numpy(), count, num_items)  # [n, count]
    if popularity is not None:
        drawn = popularity.choose(drawn, _draw_coins(keys.numpy(), count))
    negatives = torch.from_numpy(drawn)
    if in_batch == 0 or halo <= 0 or targets.values.numel() == 0:
        return negatives
    numbers = torch.arange(in_batch)
    step = 1 + integers(derive(keys[:, None], _SAMPLE, numbers), halo)  # [n, in_batch]
    chosen = (homes[:, None] + step) % batch_size
    found = _choose_targets(keys, targets, chosen)
    some = targets.lengths[chosen] > 0
    negatives[:, :in_batch] = torch.where(some, found, negatives[:, :in_batch])
    return negatives


def _draw_targets(
    keys: Tensor, targets: Jagged, count: int, halo: int, batch_size: int, homes: Tensor
) -> Tensor:
    """[n, count] targets of the next `halo` samples that have any; 0 if none has."""
    if halo <= 0 or not targets.values.numel():
        return torch.zeros(len(keys), count, dtype=torch.int64)
    some = torch.zeros(batch_size, dtype=torch.int64)
    some[: len(targets.lengths)] = targets.lengths > 0
    before = torch.cat([torch.zeros(1, dtype=torch.int64), some.repeat(2).cumsum(0)])
    first = homes % batch_size + 1  # of the halo, [n]
    able = before[first + halo] - before[first]  # samples of the halo with targets
    numbers = torch.arange(count)
    step = integers(derive(keys[:, None], _SAMPLE, numbers), able.clamp(min=1)[:, None])
    wanted = before[first][:, None] + step  # samples with targets before it
    chosen = (torch.searchsorted(before, wanted, right=True) - 1) % batch_size
    chosen = torch.where(able[:, None] > 0, chosen, 0)
    return torch.where(able[:, None] > 0, _choose_targets(keys, targets, chosen), 0)


def _choose_targets(keys: Tensor, targets: Jagged, chosen: Tensor) -> Tensor:
    """[n, count] a target of each of the samples `chosen` [n, count]; any for those without."""
    lengths, numbers = targets.lengths[chosen], torch.arange(chosen.shape[1])
    drawn = integers(derive(keys[:, None], _POSITION, numbers), lengths.clamp(min=1))
    place = targets.offsets[chosen] + drawn
    return targets.values[place.clamp(max=targets.values.numel() - 1)]


def derive_position_keys(keys: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [tokens] of the samples' positions, and the sample [tokens] of each."""
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
    """derive(keys[:, None], name, arange(count)) in place: most of a batch's draws are
    negatives."""
    base = derive(torch.from_numpy(keys), name).numpy().view(np.uint64)
    drawn: NDArray[np.uint64] = np.add.outer(
        base * _GOLDEN, np.arange(1, count + 1, dtype=np.uint64)
    )
    mix_in_place(drawn)
    return drawn
