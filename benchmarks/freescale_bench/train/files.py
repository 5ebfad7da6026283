"""The interactions of a shape: a Parquet file as a user would provide it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale_bench.train.shapes import Shape


def write_interactions(
    shape: Shape, path: Path, seed: int = 0, popularity: float | None = 1.0
) -> Path:
    """Writes user_id, item_id (from 1; `popularity` is the exponent of Zipf's law; None: every item
    occurs before any repeats) and timestamp."""
    lengths = shape.draw_lengths(seed)
    random = np.random.default_rng(seed + 1)
    users = np.repeat(np.arange(len(lengths)), lengths)
    if popularity is None:
        items = 1 + np.resize(random.permutation(shape.items), len(users))
    else:
        weights = 1.0 / np.arange(1, shape.items + 1) ** popularity
        ends = np.cumsum(weights / weights.sum())
        items = 1 + np.minimum(np.searchsorted(ends, random.random(len(users))), shape.items - 1)
    starts = np.cumsum(lengths) - lengths
    times = np.arange(len(users)) - starts[users]
    columns = {"user_id": users, "item_id": items, "timestamp": 60 * times}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path
