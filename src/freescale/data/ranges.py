"""Ranges of indices, one after another, without a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def list_ranges(starts: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """Index ranges [starts[i], starts[i] + lengths[i]), one after another: [sum(lengths)]."""
    ends = np.cumsum(lengths)
    index = np.repeat(starts - (ends - lengths), lengths)
    index += np.arange(len(index))
    return index


def split_evenly(lengths: NDArray[Any], most: int) -> list[tuple[int, int]]:
    """Blocks [first, last) of ranges with about `most` indices each; a longer range is a block of
    its own."""
    ends = np.cumsum(lengths)
    block = np.maximum(ends - 1, 0) // most
    edges = np.flatnonzero(np.diff(block, prepend=-1, append=-1))
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
