"""Events that come in files, and runs that follow them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from freescale.config import RunConfig
from freescale.data.store.event_store import EventStore
from freescale.data.stream.stream import STORE, Stream, read_manifests
from freescale.train.follow import open_stream
from freescale.train.trainer import Trainer
from freescale.transport.local import LocalTransport

HOUR, START = 3600, 1_699_920_000


def make_events(count: int = 600, hours: int = 12, seed: int = 0, text: bool = True) -> pa.Table:
    """Events in order of time, several of them at equal times, each with an id."""
    random = np.random.default_rng(seed)
    users, items = random.integers(0, 20, count), random.integers(0, 40, count)
    return pa.table(
        {
            "user_id": [f"u{n}" for n in users] if text else users,
            "item_id": [f"i{n}" for n in items] if text else items,
            "timestamp": START + np.sort(random.integers(0, hours * 60, count)) * 60,
            "action": random.choice([1, 2, 4], count),
            "event": [f"e{seed}-{n}" for n in range(count)],
        }
    )


def add_features(table: pa.Table) -> pa.Table:
    """With a channel, further ones of which come all the time, and a price."""
    random, count = np.random.default_rng(9), table.num_rows
    channels = [f"c{n}" for n in random.integers(0, 3 + np.arange(count) // 30)]
    missing = random.random(count) < 0.1
    prices = random.integers(0, 40, count) / 4
    table = table.append_column("channel", pa.array(channels, mask=missing))
    return table.append_column("price", pa.array(prices, mask=random.random(count) < 0.1))


def write_attributes(folder: Path, text: bool = True) -> dict[str, str]:
    """Files of items and users, a few of them missing; and settings of runs that read them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("item", 40), ("user", 20)):
        ids = [n for n in range(count) if n % 9]
        table = {f"{name}_id": [f"{name[0]}{n}" for n in ids] if text else ids}
        table |= {f"{name}_kind": [f"{name}-{n % 6}" for n in ids]}
        pq.write_table(pa.table(table), folder / f"{name}s.parquet")
    paths = {f"{name}s": str(folder / f"{name}s.parquet") for name in ("item", "user")}
    return paths | {"features": f"{FEATURES},item_kind,user_kind"}


FEATURES = "channel=categorical,price=numeric:4,context.channel=categorical"


def move(folder: Path, name: str, table: pa.Table) -> Path:
    """Writes a file elsewhere and moves it into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder.parent / f"{name}.part"
    pq.write_table(table, part)
    return part.replace(folder / name)


def split(table: pa.Table, files: int) -> list[tuple[str, pa.Table]]:
    edges = np.linspace(0, table.num_rows, files + 1).astype(int)
    spans = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return [(f"part-{n:03}.parquet", table.slice(a, b - a)) for n, (a, b) in enumerate(spans)]


def configure(source: Path | str, cache: Path, **settings) -> RunConfig:
    small = {
        "follow": str(source), "cache": str(cache), "rows": "item=dynamic:64", "window": "1h",
        "max_length": 12, "width": 8, "layers": 1, "heads": 1, "global_batch": 8, "negatives": 8,
        "device": "cpu", "placement": "sharded", "trace_steps": 0, "profile_steps": 0,
        "log_every": 1000, "stop_when_idle": 0.4,
    }  # fmt: skip
    return RunConfig.from_settings(small | settings)


def open_one(folder: Path, source: Path | str, **settings) -> Stream:
    config = configure(source, folder / "cache", **settings)
    return open_stream(config.data, config.model.labels, folder)


def read_on(stream: Stream, most: int = 1000) -> None:
    """Reads what is there."""
    before = None
    for _ in range(most):
        stream.advance(0.0)
        if before == (before := stream.last_read):
            return


def read_windows(folder: Path) -> list[dict]:
    return list(read_manifests(folder))


def read_store(folder: Path, *columns: str) -> list[tuple]:
    """User, item and time of the events of a stream, one user after another."""
    store = EventStore(folder / STORE)
    users = np.unique(np.concatenate([segment.users for segment in store.segments]))
    located = store.locate(users)
    lengths = located.lengths
    events = store.select(located, np.zeros_like(lengths), lengths)
    names = ("item_id", "timestamp", *columns)
    values = [np.repeat(users, lengths), *(events.read(name) for name in names)]
    return list(zip(*(each.tolist() for each in values), strict=True))


def train(transport, config: RunConfig, folder: Path, resume=False, **options):
    """Trains until the source is idle. Returns the bits of the model, and its steps."""
    run = Trainer(config, folder, transport=transport, resume=resume, **options)
    run.train()
    return read_bits(run), run.step


def read_bits(run: Trainer) -> dict[str, torch.Tensor]:
    """Tables with their optimizer's and counters' state by id, of all ranks; and dense weights."""
    tables, found = run.model.tables, {}
    for name in tables.specs:
        rows = tables.get_group(name).rows
        ids = rows.get_ids(name)
        parts = {"ids": ids}
        for part, values in rows.get_tensors(name).items():
            used = rows._list_used() if len(values) != len(ids) else torch.arange(len(ids))
            parts[part] = values.index_select(0, used)
        gathered = list(map(pickle.loads, run.transport.gather_bytes(pickle.dumps(parts))))
        whole = {part: torch.cat([each[part] for each in gathered]) for part in parts}
        order = whole["ids"].argsort()
        found |= {f"{name}.{part}": values[order] for part, values in whole.items()}
    return found | {n: p.detach().clone() for n, p in run.model.module.named_parameters()}


def train_alone(config: RunConfig, folder: Path, **options):
    return train(LocalTransport(), config, folder, **options)


def describe_windows(windows: Iterable[dict]) -> list[tuple]:
    return [(each["number"], each["window"], each["events"], each["digest"]) for each in windows]
