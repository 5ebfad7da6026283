"""Draws negatives from keys, so that they are the same on any rank: of samples, of their positions,
or of a batch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.batch import Jagged
from freescale.random import derive, hash_name, integers

_UNIFORM, _SAMPLE, _POSITION = (
    hash_name("uniform negative"),
    hash_name("negative's sample"),
    hash_name("negative's position"),
)
# of random.mix, as unsigned numbers: shifts, each with the factor that follows it
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), None),
)
_TOKEN, _BATCH = hash_name("negatives of a position"), hash_name("negatives of a batch")


# Events of a mean history below which a batch shares its negatives. A sample's own are rows that
# few positions use: 256 rows for 6 positions cost many times what the positions do.
SHORT = 32.0


def choose_negatives_per(asked: str, mean_length: float) -> str:
    """What has negatives of its own: `sample`, `position` or `batch`.

    Args:
        asked: One of these, or `auto`, which leaves it to this rule.
        mean_length: Events of a history, on average over the file.
    """
    if asked != "auto":
        return asked
    return "batch" if mean_length < SHORT else "sample"


def choose_negatives(asked: int | None, per: str) -> int:
    """How many negatives each sample, position or batch (`per`) has. A batch has more: its
    positions, of all samples, see no others."""
    if asked is not None:
        return asked
    return 1024 if per == "batch" else 256


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
    negatives = torch.from_numpy(_draw_uniformly(keys.numpy(), count, num_items))  # [n, count]
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
    drawn = targets.values[place.clamp(max=targets.values.numel() - 1)]
    negatives[:, :in_batch] = torch.where(lengths > 0, drawn, negatives[:, :in_batch])
    return negatives


def _draw_uniformly(keys: NDArray[np.int64], count: int, bound: int) -> NDArray[np.int64]:
    """integers(derive(keys[:, None], _UNIFORM, arange(count)), bound), in place in one array: the
    negatives are most of what a batch draws."""
    base = derive(torch.from_numpy(keys), _UNIFORM).numpy().view(np.uint64)
    drawn, shifted = (np.empty((len(keys), count), np.uint64) for _ in range(2))
    np.add((base * _GOLDEN)[:, None], np.arange(1, count + 1, dtype=np.uint64), out=drawn)
    for bits, factor in _MIX:
        np.right_shift(drawn, bits, out=shifted)
        drawn ^= shifted
        if factor is not None:
            drawn *= factor
    drawn >>= np.uint64(1)
    # a division by one number is many times faster than the remainder, for numpy
    np.floor_divide(drawn, np.uint64(bound), out=shifted)
    shifted *= np.uint64(bound)
    drawn -= shifted
    return drawn.view(np.int64)


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
