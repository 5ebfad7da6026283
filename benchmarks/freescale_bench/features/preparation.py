"""Memory and time of preparing generated events, with and without features. Each preparation is a
process of its own, which starts with about 300 MB of libraries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.config import DataConfig, RunConfig
from freescale.data.batches.specs import SplitSpec
from freescale.data.features.prepare import prepare_features
from freescale.train.build import prepare_data
from freescale_bench.common.repository import package_path
from freescale_bench.common.results import Claim, Destination, Row, at_most, write
from freescale_bench.common.turns import read_peak_memory

PLAIN, WITH, JOIN = "histories alone", "histories with a column of events", "features"
_ROWS = 1 << 20  # of a chunk of a generated file
_CATEGORIES, _BRANDS, _TAGS, _CHANNELS = 1000, 50_000, 500, 5
_EVENTS_PER_USER = 50
_GIB, _PER_ITEM, _PER_EVENT, _MORE = 3.0, 200.0, 1.0, 100.0  # targets


def bench_preparation(items: int, events: int, folder: Path, to: Destination) -> None:
    """Measures a tenth of both numbers, all items with a tenth of the events, and everything."""
    rows: list[Row] = []
    for some, many in ((items // 10, events // 10), (items, events // 10), (items, events)):
        work = (folder / f"{some}-items-{many}-events").absolute()
        work.mkdir(parents=True)
        try:
            rows += measure(some, many, work)
        finally:
            shutil.rmtree(work)
    command = f"freescale bench features preparation --item-count {items} --event-count {events}"
    write("features-preparation", "cpu", command, rows, make_claims(rows), ["pyarrow"], to=to)


def make_claims(rows: Sequence[Row]) -> list[Claim]:
    small, wide, full = (row for row in rows if row["arm"] == JOIN)
    plain = [row for row in rows if row["arm"] == PLAIN][-1]
    size = f"{full['items']:,} items, {full['events']:,} events"
    per_item = (wide["peak_bytes"] - small["peak_bytes"]) / (wide["items"] - small["items"])
    per_event = (full["peak_bytes"] - wide["peak_bytes"]) / (full["events"] - wide["events"])
    more = 100 * full["seconds"] / plain["seconds"]
    return [
        at_most(f"{size}: peak memory of features", _GIB, full["peak_bytes"] / (1 << 30), "GiB"),
        at_most("memory of features for each further item", _PER_ITEM, per_item, "bytes"),
        at_most("memory of features for each further event", _PER_EVENT, per_event, "bytes"),
        at_most(f"{size}: time of features, to that of histories alone", _MORE, more, "%"),
    ]


def measure(items: int, events: int, work: Path) -> Iterator[Row]:
    described, logged = str(work / "items.parquet"), str(work / "events.parquet")
    _write(described, items, lambda random, ids: _make_items(random, ids, items))
    _write(logged, events, lambda random, ids: _make_events(random, ids, items, events))
    plain = DataConfig(data=logged, cache=str(work / "plain"))
    featured = DataConfig(data=logged, items=described, features="auto", cache=str(work / "with"))
    environment = {**os.environ, "PYTHONPATH": package_path()}
    for arm, data in ((PLAIN, plain), (WITH, featured), (JOIN, featured)):
        command = [sys.executable, "-m", __name__, arm, json.dumps(asdict(data))]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        row = {"items": items, "events": events, "arm": arm, **json.loads(done.stdout)}
        print(row, flush=True)
        yield row


def _write(
    path: str, rows: int, make: Callable[[np.random.Generator, np.ndarray], dict[str, pa.Array]]
) -> None:
    random, writer = np.random.default_rng(1), None
    for first in range(0, rows, _ROWS):
        table = pa.table(make(random, np.arange(first, min(first + _ROWS, rows))))
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def _make_items(random: np.random.Generator, ids: np.ndarray, items: int) -> dict[str, pa.Array]:
    sizes = random.integers(0, 6, len(ids))
    offsets = pa.array(np.append(0, np.cumsum(sizes)), pa.int32())
    tags = _name("tag", _draw(random, _TAGS, int(sizes.sum())))
    return {
        "item_id": pa.array(ids),
        "category": _name("category", _draw(random, _CATEGORIES, len(ids))),
        "brand": _name("brand", _draw(random, min(_BRANDS, 1 + items // 20), len(ids))),
        "price": pa.array(random.lognormal(3, 1, len(ids)).round(2)),
        "tags": pa.ListArray.from_arrays(offsets, tags),
    }


def _make_events(
    random: np.random.Generator, times: np.ndarray, items: int, events: int
) -> dict[str, pa.Array]:
    users = (events // _EVENTS_PER_USER * random.random(len(times)) ** 1.5).astype(np.int64)
    return {
        "user_id": pa.array(users),
        "item_id": pa.array(_draw(random, items, len(times)) * 1_000_003 % items),
        "timestamp": pa.array(1_700_000_000 + times // 4),
        "channel": _name("channel", _draw(random, _CHANNELS, len(times))),
    }


def _draw(random: np.random.Generator, values: int, count: int) -> np.ndarray:
    """[count] of the numbers below `values`: n with a probability of about 1 / n, as Zipf's."""
    drawn: np.ndarray = np.exp(random.random(count) * np.log(values)).astype(np.int64)
    return drawn


def _name(word: str, numbers: np.ndarray) -> pa.Array:
    names = pa.array([f"{word} {n}" for n in range(int(numbers.max(initial=0)) + 1)])
    return names.take(pa.array(numbers))


def main(arm: str, given: str) -> None:
    """Prepares the data in this process. Prints time and memory of each stage as JSON."""
    config = RunConfig(data=DataConfig(**json.loads(given)))
    libraries, begun = read_peak_memory(), time.perf_counter()
    stages: dict[str, dict[str, float]] = {}
    last, since = "open", begun

    def report(stage: str, share: float) -> None:
        """Adds the time since the last report to the stage of that report."""
        nonlocal last, since
        found = stages.setdefault(last, {"seconds": 0.0})
        now = time.perf_counter()
        found["seconds"] += now - since
        found["peak_bytes"] = read_peak_memory()
        last, since = stage, now

    if arm == JOIN:
        histories = prepare_data(config)
        begun = since = time.perf_counter()
        cache = Path(str(config.data.cache))
        store = prepare_features(config.data, histories, cache, SplitSpec(), progress=report)
        assert store is not None and store.item and store.event
    else:
        prepare_data(config, report)
    report("", 1.0)
    row = {"seconds": time.perf_counter() - begun, "peak_bytes": read_peak_memory()}
    print(json.dumps(row | {"libraries_bytes": libraries, "stages": stages}))


if __name__ == "__main__":
    main(*sys.argv[1:])
