"""The tiles of the summary attention: a table that its launches upload and its kernels read."""

from __future__ import annotations

import numpy as np

from freescale.kernels.summary_plan import SummaryPlan


def plan_tiles(plan: SummaryPlan, of: str, size: int) -> np.ndarray:
    """Tiles of `size` rows that see some summary (`of` "rows") or of `size` summaries.

    Returns:
        [tiles, SummaryTileColumn] int64, the tile with the longest loop first.
    """
    start, first = plan.starts
    period, tokens = plan.segments.period, plan.segments.tokens
    if of == "rows":
        begin = np.where(plan.known > 0, 0, period)
        end = np.where(plan.counts > 0, plan.lengths, 0)
    else:
        begin = np.zeros_like(start)
        end = np.where(plan.lengths > 0, plan.counts, 0)
    per_sample = np.maximum(-(-(end - begin) // size), 0)
    sample = np.repeat(np.arange(len(start)), per_sample)
    number = np.arange(len(sample)) - (np.cumsum(per_sample) - per_sample)[sample]  # in its sample
    place = begin[sample] + number * size
    cost = place if of == "rows" else plan.lengths[sample] - place // tokens * period
    columns = (start, plan.lengths, first, plan.closed, plan.known)
    table = np.column_stack([*(column[sample] for column in columns), place])
    return table[np.argsort(-cost, kind="stable")]
