"""A flat table of impressions, and its schema."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FEATURES = "item.category,item.price=numeric:4,item.tags=multi,hour=categorical"
TRAIN, TEST = "day<6", "day>=6"


def make_table(rows=203, seed=0):
    """`paid` is the row's number from 1 on: it names each row."""
    draw = np.random.default_rng(seed)
    items = draw.integers(0, 40, rows)
    return pa.table(
        {
            "user_id": draw.integers(0, 30, rows),
            "item_id": [f"i{item}" for item in items],
            "category": [f"c{item % 5}" if item % 9 else None for item in items],
            "price": draw.random(rows).round(3),
            "tags": ["|".join(draw.choice(["new", "sale", "eco"], item % 3)) for item in items],
            "hour": draw.integers(0, 24, rows),
            "day": np.arange(rows) * 8 // rows,
            "click": draw.integers(0, 2, rows),
            "paid": np.arange(1, rows + 1),
        }
    )


def write_table(path, table=None):
    pq.write_table(make_table() if table is None else table, path, row_group_size=50)
    return path
