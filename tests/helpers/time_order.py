"""Small histories with equal times, and their samples in order of time by loops over lists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.config import RunConfig
from freescale.data import ReadSpec, SampleSpec, SplitSpec
from freescale.data.batches.loader import Histories
from freescale.data.batches.time_order import TimeSpec
from freescale.data.histories import HistoriesFile
from freescale.data.store.build import build_store

COLUMNS = ("item_id", "timestamp", "action", "click")
User = dict[str, list]  # by column


def make_users(
    random: np.random.Generator, count: int, most: int, times: int = 40
) -> dict[int, User]:
    """Users with some events each, many of them at equal times."""
    users = {}
    for user in random.permutation(3 * count)[:count].tolist():
        size = int(random.integers(0, most + 1))
        users[user] = {
            "item_id": random.integers(0, 50, size).tolist(),
            "timestamp": sorted(random.integers(0, times, size).tolist()),
            "action": random.choice([1, 2, 4], size).tolist(),
            "click": random.integers(0, 2, size).tolist(),
        }
    return users


def write_users(path: Path, users: dict[int, User], group: int = 3) -> HistoriesFile:
    """A histories file, with the users in the order of their last events."""
    ordered = sorted(users, key=lambda user: (users[user]["timestamp"] or [-1])[-1])
    table = pa.table(
        {"user_id": pa.array(ordered, pa.int64())}
        | {
            name: pa.array([users[user][name] for user in ordered], pa.list_(pa.int64()))
            for name in COLUMNS
        }
    )
    pq.write_table(table, path, row_group_size=group)
    return HistoriesFile(path)


def cut(users: dict[int, User], low: int, high: int) -> dict[int, User]:
    """The events of users from a time on and before another; users without any are left out."""
    found = {}
    for user, events in users.items():
        kept = [n for n, time in enumerate(events["timestamp"]) if low <= time < high]
        if kept:
            found[user] = {name: [events[name][n] for n in kept] for name in COLUMNS}
    return found


def list_samples(
    users: dict[int, User],
    window: int,
    number: int,
    *,
    most: int,
    actions: tuple[int, ...] = (),
    least: int = 1,
    by_position: bool = False,
) -> list[tuple[int, list[int]]]:
    """User and anchors (places in the history) of the samples of a window, in its order."""
    found = []
    for user, events in users.items():
        times = events["timestamp"]
        anchors = []
        for place, time in enumerate(times):
            before = place if by_position else sum(other < time for other in times)
            wanted = not actions or events["action"][place] in actions
            if wanted and time // window == number and before >= least:
                anchors.append(place)
        found += [(user, anchors[n : n + most]) for n in range(0, len(anchors), most)]
    return sorted(found, key=lambda s: (users[s[0]]["timestamp"][s[1][0]], s[0], s[1][0]))


def list_history(
    events: User, anchor: int, max_length: int, pools: tuple[int, ...] = ()
) -> list[int]:
    """Places of the history of ranking: strictly earlier, the last ones of each pool."""
    past = [n for n, t in enumerate(events["timestamp"]) if t < events["timestamp"][anchor]]
    if not pools:
        return past[-max_length:]
    share = max_length // len(pools)
    kept = [[n for n in past if events["action"][n] == action][-share:] for action in pools]
    return sorted(sum(kept, []))


def open_windows(
    file: HistoriesFile,
    store: Path,
    windows: range,
    *,
    window: int = 10,
    task: str = "ranking",
    global_batch: int = 4,
    part: str = "train",
    max_length: int = 6,
    candidates: int = 1,
    cut: int = 0,
    rank: int = 0,
    world: int = 1,
    read: dict | None = None,
    features=None,
    negatives=None,
    **time,
) -> Histories:
    """The batches of a store; `time`: of `TimeSpec`."""
    tasks = ("click",) if task == "ranking" else ()
    return Histories(
        file.path, global_batch, rank=rank, world=world, features=features, negatives=negatives,
        sample=SampleSpec(task, tasks, max_length, candidates),
        split=SplitSpec("windows", cut, part),
        read=ReadSpec(**(read or {})),
        time=TimeSpec(store, window, windows, **time),
    )  # fmt: skip


def build(folder: Path, users: dict[int, User], group: int = 3) -> HistoriesFile:
    """The histories file `users.parquet` and the store in `store` of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = write_users(folder / "users.parquet", users, group)
    build_store(file, folder / "store")
    return file


def read_all(data: Histories) -> list[dict[str, list]]:
    """Every column of every sample, batch by batch."""
    found = []
    for number in range(data.stop):
        batch = data.batch(number)
        parts = {
            name: [part.tolist() for part in column.values.split(column.lengths.tolist())]
            for name, column in batch.sequences.items()
        }
        for name, nested in batch.candidates.items():
            counts = nested.counts.tolist()
            parts[name] = [part.tolist() for part in nested.values.split(counts)]
        parts |= {name: values.tolist() for name, values in batch.dense.items()}
        found += [{name: values[n] for name, values in parts.items()} for n in range(len(batch))]
    return found


# ---- runs

DAY = 86_400
START = 1_699_920_000  # midnight UTC


def write_events(path: Path, days: int = 6, *, text: bool = False) -> Path:
    """Interactions of some days, several of them at equal times, as a service would log them."""
    random = np.random.default_rng(0)
    count = 120 * days
    users, items = random.integers(0, 25, count), random.integers(0, 60, count)
    times = START + np.sort(random.integers(0, 24 * days, count)) * 3600
    pq.write_table(
        pa.table(
            {
                "user_id": [f"u{n}" for n in users] if text else users,
                "item_id": [f"i{n}" for n in items] if text else items,
                "timestamp": times,
                "action": random.choice([1, 2, 4], count),
                "click": random.integers(0, 2, count),
                "channel": random.choice(["web", "app", "shop"], count),
            }
        ),
        path,
    )
    return path


def configure(folder: Path, data: Path, **settings) -> RunConfig:
    """A small run in order of time."""
    small = {
        "data": str(data), "cache": str(folder / "cache"), "max_length": 12, "order": "time",
        "width": 8, "layers": 1, "heads": 1, "global_batch": 16, "device": "cpu",
        "placement": "sharded", "trace_steps": 0, "profile_steps": 0, "log_every": 1000,
    }  # fmt: skip
    if settings.get("task") == "ranking":
        small |= {"labels": "click", "candidates": 2}
    else:
        small |= {"negatives": 8}
    return RunConfig.from_settings(small | settings)
