"""Histories cut into segments (PerSRec, arXiv 2601.03479): who sees whom, counted and laid out.
Pure arithmetic.

After each full segment of `length` events stand `tokens` learned tokens, here called summaries,
since every row of a sequence is a token in these kernels. Later rows see a segment through its
summaries alone:

    an event     sees the events of its own segment up to itself, and the summaries of all earlier segments
    a summary    sees its whole segment, the summaries before it in its block, and those of all earlier segments
    a candidate  sees what the next event would see, and itself

What is left after the last full segment is open: it has no summaries. A segment with its summaries
attends like a sample of its own, causally; what it sees beyond itself is the first so many
summaries of its history. SiLU attention is a sum over keys, without a normalizer: the two parts are
computed apart and added, what is not seen is not visited, and no mask is ever in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from freescale.batch import HostSizes


@dataclass(frozen=True)
class Segments:
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

    def closed(self, history: Any) -> Any:
        """Full segments of histories of so many events: a number, an array or a tensor."""
        return history // self.length

    def summaries(self, history: Any) -> Any:
        return self.closed(history) * self.tokens

    def pairs(self, history: np.ndarray, candidates: np.ndarray | int = 0) -> np.ndarray:
        """[n] histories and candidates -> [n] float64: how many (query, key) pairs see each
        other."""
        history = np.asarray(history, np.float64)
        length, tokens, closed = self.length, self.tokens, history // self.length
        rest = history - closed * length
        earlier = closed * (closed - 1) / 2  # pairs of segments, one before the other
        within = closed * _triangle(self.period) + _triangle(rest)
        beyond = earlier * self.period * tokens + rest * closed * tokens
        return within + beyond + candidates * (rest + closed * tokens + 1)

    def parts(self, sizes: Sizes) -> HostSizes:
        """The segments of a batch as samples of their own, in the order of their rows: lengths with
        the summaries, and candidates with the open parts. Segments without a row do not exist."""
        closed = self.closed(sizes.history)
        per_sample = closed + 1
        last = np.cumsum(per_sample) - 1  # the open part of each sample
        lengths = np.full(int(per_sample.sum()), self.period, np.int64)
        lengths[last] = sizes.lengths - closed * self.length
        candidates = np.zeros_like(lengths)
        candidates[last] = sizes.lengths - sizes.history
        some = lengths > 0
        return HostSizes(torch.from_numpy(lengths[some]), torch.from_numpy(candidates[some]))


def _triangle(rows: Any) -> Any:
    return rows * (rows + 1) / 2
