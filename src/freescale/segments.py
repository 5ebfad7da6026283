"""Histories cut into segments (PerSRec, arXiv 2601.03479): who sees whom, as pure arithmetic.

Each full segment of `length` events is followed by `tokens` learned tokens, called summaries. Later
rows see a segment only through its summaries:

    an event     sees its own segment up to itself, and the summaries of all earlier segments
    a summary    sees its whole segment, the summaries before it in its block, and the summaries of
                 all earlier segments
    a candidate  sees what the next event would see, and itself

The events after the last full segment are open: they have no summaries. A segment with its
summaries attends causally, like a sample of its own; beyond itself it sees a prefix of the
summaries of its history. SiLU attention is a sum over keys, without a normalizer: the two parts are
computed apart and added, pairs that do not see each other are not visited, and no mask is ever in
memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from freescale.batch import HostSizes


@dataclass(frozen=True)
class Segments:
    """How histories are cut.

    Raises:
        ValueError: If a segment has no event, or more summaries than events.
    """

    length: int  # events of a segment
    tokens: int  # summaries after it

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"a segment must have at least 1 event, not {self.length}")
        if not 1 <= self.tokens <= self.length:
            raise ValueError(
                f"a segment of {self.length} events takes 1 to {self.length} tokens, "
                f"not {self.tokens}"
            )

    @property
    def period(self) -> int:
        """Rows from the start of one segment to that of the next."""
        return self.length + self.tokens

    def count_closed(self, history: Any) -> Any:
        """Full segments for a number of events, an array or a tensor of numbers."""
        return history // self.length

    def count_summaries(self, history: Any) -> Any:
        """Summaries for a number of events, an array or a tensor of numbers."""
        return self.count_closed(history) * self.tokens

    def count_pairs(self, history: np.ndarray, candidates: np.ndarray | int = 0) -> np.ndarray:
        """Visible (query, key) pairs, [n] float64, for `history` [n] events and `candidates`
        [n]."""
        history = np.asarray(history, np.float64)
        length, tokens, closed = self.length, self.tokens, history // self.length
        rest = history - closed * length
        earlier = closed * (closed - 1) / 2  # pairs of segments, one before the other
        within = closed * _triangle(self.period) + _triangle(rest)
        beyond = earlier * self.period * tokens + rest * closed * tokens
        count: np.ndarray = within + beyond + candidates * (rest + closed * tokens + 1)
        return count

    def split_rows(self, lengths: np.ndarray, history: np.ndarray) -> HostSizes:
        """Segments as samples of their own, in the order of their rows, without empty ones.

        A sample of `lengths` [samples] rows has `history` [samples] events before its candidates,
        which belong to its open part. Lengths of the result include summaries.
        """
        closed = self.count_closed(history)
        per_sample = closed + 1
        last = np.cumsum(per_sample) - 1  # the open part of each sample
        rows = np.full(int(per_sample.sum()), self.period, np.int64)
        rows[last] = lengths - closed * self.length
        candidates = np.zeros_like(rows)
        candidates[last] = lengths - history
        some = rows > 0
        return HostSizes(torch.from_numpy(rows[some]), torch.from_numpy(candidates[some]))


def _triangle(rows: Any) -> Any:
    return rows * (rows + 1) / 2
