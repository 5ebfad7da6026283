"""Which rows of a batch attend to which summaries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from freescale.segments import Segments


@dataclass(frozen=True)
class SummaryPlan:
    """Which rows see which summaries.

    Row i of a sample sees the first (known + min(i // period, closed)) * tokens summaries of that
    sample. Rows and summaries are ordered by sample. A sample's summaries are first those of
    segments known from an earlier run, then those of its own segments. Arrays are [samples] int64
    on the host.
    """

    segments: Segments
    lengths: np.ndarray  # rows of each sample
    closed: np.ndarray  # full segments among them
    known: np.ndarray  # segments before the first row
    kept: dict[Any, Any] = field(default_factory=dict)  # tables derived from the plan

    @property
    def rows(self) -> int:
        return int(self.lengths.sum())

    @property
    def summaries(self) -> int:
        return int(self.counts.sum())

    @property
    def counts(self) -> np.ndarray:
        """[samples]: the number of summaries."""
        counts: np.ndarray = (self.known + self.closed) * self.segments.tokens
        return counts

    @property
    def starts(self) -> tuple[np.ndarray, np.ndarray]:
        """[samples] twice: the first row and the first summary."""
        return np.cumsum(self.lengths) - self.lengths, np.cumsum(self.counts) - self.counts

    def find_blocks(self) -> np.ndarray:
        """Finds the blocks of rows that see the same summaries.

        Returns:
            [blocks, 4] int64: first row, number of rows, first summary, number of summaries seen.
            Blocks without rows or summaries are left out.
        """
        per_sample = self.closed + 1
        sample = np.repeat(np.arange(len(self.lengths)), per_sample)
        # of the segment, within its sample
        number = np.arange(len(sample)) - (np.cumsum(per_sample) - per_sample)[sample]
        period, tokens = self.segments.period, self.segments.tokens
        row, summary = self.starts
        rows = np.where(
            number < self.closed[sample], period, self.lengths[sample] - number * period
        )
        seen = (self.known[sample] + number) * tokens
        table = np.column_stack([row[sample] + number * period, rows, summary[sample], seen])
        return table[(table[:, 1] > 0) & (table[:, 3] > 0)]
