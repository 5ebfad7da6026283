"""The fixed sizes to which batches are padded, so that batches of about the same size can share one
CUDA graph. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FILLER = 64  # tokens of a filling sample, at most: one tile of the attention
_STEPS = 8  # sizes between two powers of two: 4 % of the tokens are filling on average


@dataclass(frozen=True)
class StaticSize:
    """Sizes of a padded batch."""

    samples: int  # those of the batch, then those that fill it up
    real: int  # samples of the batch
    tokens: int


def choose_size(samples: int, tokens: int) -> StaticSize:
    """The smallest size that takes a batch of so many samples and tokens."""
    step = max(FILLER, (1 << max(0, tokens - 1).bit_length()) // (2 * _STEPS))
    padded = -(-max(1, tokens) // step) * step
    # `padded - tokens` is below `step`
    return StaticSize(samples + -(-step // FILLER), samples, padded)


def pad_lengths(lengths: NDArray[np.int64], size: StaticSize) -> NDArray[np.int64]:
    """[real] lengths of a batch -> [samples], which add up to the tokens of the size.

    The tokens that the batch lacks go to filling samples of FILLER tokens each; those that are not
    needed are empty.
    """
    lacking = size.tokens - int(lengths.sum())
    places = FILLER * np.arange(size.samples - size.real, dtype=np.int64)
    filling = np.clip(lacking - places, 0, FILLER)
    padded = np.concatenate([lengths, filling])
    assert int(padded.sum()) == size.tokens, "the batch does not fit the size"
    return padded
