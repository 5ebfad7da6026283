"""Runs of a few users, and the runs that continue them on the same data with newer events."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from freescale.config import RunConfig
from freescale.train.trainer import Trainer
from freescale.train.update import continue_run
from freescale.transport.local import LocalTransport

OLD, EVENTS = 400, 560  # events of the first run; of both
START, STEP = 1_700_000_000, 100  # seconds
UNTIL = START + STEP * (OLD - 1)


def make_events(*, text: bool = True, users: int = 30) -> pa.Table:
    """Events in order of time; the later ones have new users and new items."""
    random = np.random.default_rng(0)
    user = random.integers(0, users, EVENTS)
    item = random.integers(0, 60, EVENTS)
    user[OLD:] = random.integers(users // 2, users + 6, EVENTS - OLD)
    item[OLD:] = random.integers(20, 85, EVENTS - OLD)
    named = [[f"{kind}{n}" for n in ids] for kind, ids in (("u", user), ("i", item))]
    return pa.table(
        {
            "user_id": named[0] if text else user,
            "item_id": named[1] if text else item,
            "timestamp": START + STEP * np.arange(EVENTS),
            "click": random.integers(0, 2, EVENTS),
            "channel": [f"c{n}" for n in random.integers(0, 3, OLD)]
            + [f"c{n}" for n in random.integers(1, 6, EVENTS - OLD)],
        }
    )


def write_days(folder: Path, **options) -> tuple[Path, Path]:
    """The data of the first run; and all of it, later events first, as one of two files."""
    events = make_events(**options)
    old, new = folder / "old.parquet", folder / "new"
    new.mkdir()
    pq.write_table(events.slice(0, OLD), old)
    pq.write_table(events.slice(OLD), new / "a.parquet")
    pq.write_table(events.slice(0, OLD), new / "b.parquet")
    return old, new


def configure(folder: Path, data: Path, **settings) -> RunConfig:
    small = {
        "data": str(data), "cache": str(folder / "cache"), "max_length": 12, "split": "none",
        "negatives": 8, "width": 8, "layers": 1, "heads": 1, "global_batch": 8, "epochs": 2,
        "device": "cpu", "placement": "sharded", "trace_steps": 0, "profile_steps": 0,
    }  # fmt: skip
    return RunConfig.from_settings(small | settings)


def train(config: RunConfig, folder: Path, transport=None, **options) -> Trainer:
    run = Trainer(config, folder, transport=transport or LocalTransport(), **options)
    run.train()
    return run


def train_first(folder: Path, data: Path, **settings) -> Path:
    train(configure(folder, data, **settings), folder / "first")
    return folder / "first"


def follow(first: Path, data: Path | None, how: dict | None = None, **given) -> RunConfig:
    """The settings of a run that continues the one in `first`."""
    if data is not None:
        given = {"data": str(data), **given}
    return continue_run(first, RunConfig.read(first), given, **(how or {}))


def begin(config: RunConfig, folder: Path, transport=None) -> Trainer:
    """A run before its first step."""
    return Trainer(config, folder, transport=transport or LocalTransport())


def list_rows(tables, name: str) -> dict[str, torch.Tensor]:
    """Rows and optimizer state of a table, in order of ids, on one rank."""
    rows = tables.get_group(name).rows
    ids = rows.get_ids(name)
    found = {}
    for part, local in rows.get_tensors(name).items():
        found[part] = torch.empty_like(local)
        found[part][ids] = local
    return found
