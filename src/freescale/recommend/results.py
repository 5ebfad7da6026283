"""The items that were found for each user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Recommendations:
    """Items for each user, the best first.

    Attributes:
        users: their ids; None if histories came without.
        items: original ids, at most k for each user.
        scores: of these items; None for a user without a history, who gets popular items.
        unknown: events that were left out, of items that the model does not know.
    """

    users: list[Any] | None
    items: list[list[Any]]
    scores: list[list[float | None]]
    unknown: int = 0

    def __len__(self) -> int:
        return len(self.items)

    def to_table(self) -> pa.Table:
        """A row for each user and item: user, place (from 1), item, score."""
        users = range(len(self)) if self.users is None else self.users
        counts = [len(items) for items in self.items]
        return pa.table(
            {
                "user": pa.array(users).take(pa.array(np.repeat(np.arange(len(self)), counts))),
                "place": pa.array([place for n in counts for place in range(1, n + 1)], pa.int32()),
                "item": pa.array([item for items in self.items for item in items]),
                "score": pa.array([x for scores in self.scores for x in scores], pa.float32()),
            }
        )
