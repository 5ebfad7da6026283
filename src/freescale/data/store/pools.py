"""Which events of a history are read when each of some actions has a share of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.data.ranges import list_ranges


def choose_pools(
    actions: NDArray[Any],
    past: NDArray[np.bool_],
    lengths: NDArray[np.int64],
    pools: Sequence[int],
    most: int,
) -> NDArray[np.bool_]:
    """[events]: whether an event is one of the last `most` of its sample with its action.

    Args:
        actions: [events] of samples, in order of time.
        past: [events] whether an event may be read.
        lengths: [samples] events of each sample.
        pools: the actions that are read.
        most: events of each action.
    """
    chosen = np.zeros(len(actions), bool)
    for action in pools:
        found = np.flatnonzero(past & (actions == action))
        first, last = find_edges(found, lengths)
        first = np.maximum(first, last - most)
        chosen[found[list_ranges(first, last - first)]] = True
    return chosen


def find_edges(
    places: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of sorted places [n] in samples of these lengths: where those of each sample begin and end,
    [samples] each."""
    edges = np.searchsorted(places, np.append(0, np.cumsum(lengths)))
    return edges[:-1], edges[1:]
