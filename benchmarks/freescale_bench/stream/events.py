"""Generated events, and programs that send them: into a folder or to a topic."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

START, WINDOW = 1_700_006_400, 3600  # seconds
PARTITIONS = 4  # of a topic of librdkafka's mock


def make_events(windows: int, each: int, users: int, items: int, seed: int) -> pa.Table:
    """Events of some windows, in order of time but for a few that come some minutes late. Items are
    popular by Zipf's law, and further ones appear as time passes."""
    random = np.random.default_rng(seed)
    count = windows * each
    times = np.sort(random.integers(0, windows * WINDOW, count))
    grown = items * (1 + times / (windows * WINDOW)) / 2
    item = (grown * random.random(count) ** 3).astype(np.int64)
    user = (users * random.random(count) ** 1.5).astype(np.int64)
    late = random.random(count) < 0.02
    order = np.argsort(times + late * random.integers(0, 900, count), kind="stable")
    return pa.table(
        {
            "user_id": pa.array([f"user-{n}" for n in user[order]]),
            "item_id": pa.array([f"item-{n}" for n in item[order]]),
            "timestamp": START + times[order],
            "action": random.choice([1, 2, 4], count),
            "event": pa.array([f"{seed}-{n}" for n in range(count)]),
        }
    )


def split(events: pa.Table, files: int) -> Iterator[pa.Table]:
    """Files of events, each with some of the one before it, as of a sender that tries again."""
    edges = np.linspace(0, events.num_rows, files + 1).astype(int).tolist()
    for number, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        again = events.slice(max(0, low - 3), 3) if number % 5 == 0 else events.slice(0, 0)
        yield pa.concat_tables([again, events.slice(low, high - low)])


def write_file(folder: Path, number: int, table: pa.Table) -> Path:
    """Writes a file elsewhere, and moves it into the folder."""
    part = folder.parent / f"{folder.name}-{number:06}.part"
    pq.write_table(table, part)
    return part.replace(folder / f"{number:06}.parquet")


def feed_folder(folder: str, windows: str, each: str, files: str, seed: str, pause: str) -> None:
    """Moves files into a folder, one after another. Now and then a file comes again, and the folder
    is away for a moment."""
    path, random = Path(folder), np.random.default_rng(int(seed))
    events = make_events(int(windows), int(each), 40, 120, int(seed))
    for number, table in enumerate(split(events, int(files))):
        written = write_file(path, number, table)
        time.sleep(float(pause))
        if random.random() < 0.04:
            copy = path.parent / "again.part"
            shutil.copy(written, copy)
            copy.replace(written)
        if random.random() < 0.03:
            away = path.with_name(f"{path.name}-away")
            path.rename(away)
            time.sleep(0.4)
            away.rename(path)


def feed_topic(folder: str, windows: str, each: str, files: str, seed: str, pause: str) -> None:
    """Sends events to a topic of a mock cluster, whose address is written to a file. The cluster
    lasts as long as this process."""
    from confluent_kafka import Producer

    producer = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    broker = next(iter(producer.list_topics(timeout=30).brokers.values()))
    part = Path(folder) / "address.part"
    part.write_text(f"{broker.host}:{broker.port}")
    part.replace(Path(folder) / "address")
    events = make_events(int(windows), int(each), 40, 120, int(seed))
    for table in split(events, int(files)):
        for event in table.to_pylist():
            number = find_partition(event["user_id"])
            producer.produce("events", json.dumps(event).encode(), partition=number)
        if producer.flush(30):
            os._exit(1)
        time.sleep(float(pause))
    while True:
        time.sleep(60)


def assign(
    source: str, windows: int, each: int, files: int, seed: int, lateness: int
) -> dict[str, int]:
    """The window of each event, by its id: an oracle, event by event."""
    found: dict[str, int] = {}
    tops: dict[int, int] = {}
    for table in split(make_events(windows, each, 40, 120, seed), files):
        before = dict(tops)
        for event in table.to_pylist():
            clock = 0 if source == "folder" else find_partition(event["user_id"])
            seen = before if source == "folder" else tops  # a file is read whole
            first = (seen[clock] - lateness) // WINDOW if clock in seen else 0
            time = event["timestamp"]
            found.setdefault(event["event"], max(first, time // WINDOW))
            tops[clock] = max(time, tops.get(clock, time))
    return {event: window - START // WINDOW for event, window in found.items()}


def find_partition(user: str) -> int:
    return int(user.rpartition("-")[2]) % PARTITIONS


if __name__ == "__main__":
    {"folder": feed_folder, "kafka": feed_topic}[sys.argv[1]](*sys.argv[2:])
