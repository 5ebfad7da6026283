"""Draws from any distribution over the items in constant time: the alias method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class AliasTable:
    """Columns of equal width, one per item. The rest of a column belongs to one other item, its
    alias."""

    filled: NDArray[np.float64]  # [items] share of the column that is the item's own
    aliases: NDArray[np.int64]  # [items]

    @staticmethod
    def of(weights: NDArray[Any]) -> AliasTable:
        """The table of probabilities proportional to `weights` [items]: none negative, some above
        0.

        Items below the mean (light) are filled up by those above it (heavy), both in the order of
        their ids. A heavy item that falls below the mean is filled up by the next one. Which heavy
        item meets which light one follows from the running sums of what is missing and what is
        left over.
        """
        scaled = weights * (len(weights) / weights.sum())  # 1 is the width of a column
        filled, aliases = np.minimum(scaled, 1.0), np.arange(len(weights))
        is_heavy = scaled >= 1
        is_heavy[np.argmax(scaled)] = True  # even if rounding leaves none
        light, heavy = np.flatnonzero(~is_heavy), np.flatnonzero(is_heavy)
        missing, left = np.cumsum(1 - scaled[light]), np.cumsum(scaled[heavy] - 1)
        before = np.concatenate([[0.0], missing[:-1]])[: len(light)]
        last = len(heavy) - 1
        aliases[light] = heavy[np.minimum(np.searchsorted(left, before, "right"), last)]
        # the light item that takes the rest of a heavy one, or more
        end = np.searchsorted(missing, left, "left")
        falls = (end < len(light)) & (left > 0) & (np.arange(len(heavy)) < last)
        filled[heavy[falls]] = 1 + left[falls] - missing[end[falls]]
        aliases[heavy[falls]] = heavy[np.flatnonzero(falls) + 1]
        return AliasTable(filled, aliases)

    def choose(self, columns: NDArray[np.int64], coins: NDArray[np.float64]) -> NDArray[np.int64]:
        """Items [...] of uniform columns [...] and uniform coins [...] in [0, 1)."""
        own = coins < self.filled[columns]
        return np.where(own, columns, self.aliases[columns])
