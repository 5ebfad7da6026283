"""`freescale train` on a few users, and what it wrote."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from helpers.command import freescale

SMALL = [
    "--device",
    "cpu",
    "--global-batch",
    "16",
    "--width",
    "8",
    "--negatives",
    "8",
    "--max-length",
    "20",
    "--log-every",
    "2",
    "--layers",
    "1",
]


def interactions(path: Path, users: int = 40, **changes) -> Path:
    """Events of a few users, in the order of time, as a service would log them."""
    random = np.random.default_rng(0)
    events = users * 12
    columns = {
        "user_id": random.integers(0, users, events),
        "item_id": random.integers(0, 60, events),
        "timestamp": np.arange(events) * 10,
    }
    table = pa.table(
        {name: column for name, column in (columns | changes).items() if column is not None}
    )
    pq.write_table(table, path)
    return path


def train(
    folder: Path, data: Path, *more: object, run=freescale, **options
) -> subprocess.CompletedProcess:
    return run(
        "train",
        "--data",
        data,
        "--folder",
        folder / "run",
        "--cache",
        folder / "cache",
        *SMALL,
        *more,
        **options,
    )


def metrics(folder: Path) -> list[dict]:
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    return [{k: v for k, v in line.items() if k != "samples_per_second"} for line in lines]
