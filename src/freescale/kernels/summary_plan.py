"""Which rows of a batch attend to which summaries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from freescale.segments import Segments


@dataclass(frozen=True)
class SummaryPlan:
    """Which rows see which summaries: row i of sample s the first (known + min(i // period,
    closed)) * tokens of the sample's.

    Rows lie sample after sample, and so do summaries: first those that were `known` before (kept
    from an earlier run), then those of the sample's own segments. Arrays are [samples] int64 on the
    host. `kept` holds what the kernels make of it."""

    segments: Segments
    lengths: np.ndarray  # rows
    closed: np.ndarray  # own full segments
    known: np.ndarray  # segments before the first row
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return int(self.lengths.sum())

    @property
    def summaries(self) -> int:
        return int(self.counts.sum())

    @property
    def counts(self) -> np.ndarray:
        """[samples] summaries of each."""
        return (self.known + self.closed) * self.segments.tokens

    @property
    def starts(self) -> tuple[np.ndarray, np.ndarray]:
        """[samples] first row and first summary of each."""
        return np.cumsum(self.lengths) - self.lengths, np.cumsum(self.counts) - self.counts

    def blocks(self) -> np.ndarray:
        """[blocks, 4] int64: first row, rows, first summary, summaries that they see; only where
        both are some. The rows of a block see the same ones."""
        per_sample = self.closed + 1
        sample = np.repeat(np.arange(len(self.lengths)), per_sample)
        # of the segment in its sample
        number = np.arange(len(sample)) - (np.cumsum(per_sample) - per_sample)[sample]
        period, tokens = self.segments.period, self.segments.tokens
        row, summary = self.starts
        rows = np.where(
            number < self.closed[sample], period, self.lengths[sample] - number * period
        )
        table = np.column_stack(
            [
                row[sample] + number * period,
                rows,
                summary[sample],
                (self.known[sample] + number) * tokens,
            ]
        )
        return table[(table[:, 1] > 0) & (table[:, 3] > 0)]
