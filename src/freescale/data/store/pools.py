"""Which events of a history are read when each of some actions has a share of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
    chosen, ends = np.zeros(len(actions), bool), np.cumsum(lengths)
    for action in pools:
        found = past & (actions == action)
        counts = np.cumsum(found)
        found &= counts > np.repeat(np.append(0, counts)[ends] - most, lengths)
        chosen |= found
    return chosen
