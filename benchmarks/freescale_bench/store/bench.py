"""Builds an event store of generated histories, appends to it, and reads batches from it. Each step
is a process of its own, whose peak memory is its own, too."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data import ReadSpec, SampleSpec, SplitSpec
from freescale.data.batches.loader import Histories
from freescale.data.batches.time_order import TimeSpec
from freescale.data.histories import HistoriesFile
from freescale.data.store.build import append_to_store, build_store
from freescale.data.store.event_store import EventStore
from freescale.data.store.window_index import WindowIndex
from freescale_bench.common.repository import package_path
from freescale_bench.common.results import (
    Destination,
    Row,
    at_least,
    at_most,
    show_claims,
    spread,
    write,
)
from freescale_bench.common.turns import read_peak_memory

_DAY, _DAYS = 86_400, 300
_START = 1_600_000_000 // _DAY * _DAY
# The lengths and shares of actions of a public set of music listens: median, mean and longest
# history; listens, skips and likes.
_MEDIAN, _MEAN, _LONGEST = 2695, 4763, 27_738
_ACTIONS, _SHARES = (1, 4, 2), (0.613, 0.368, 0.019)
_ITEMS = 9_390_000
_GROUP = 256  # users of a row group
_SHARE = 0.01  # of the events that are appended
_POOLS, _LONGEST_HISTORY, _BATCH, _BATCHES = (1, 2, 4), 4086, 1024, 20
# Targets: % of the build's time, samples/s of a process, GiB.
_APPEND, _READ, _MEMORY = 2.0, 85.0, 1.0


def bench_store(events: int, folder: Path, trial: bool, to: Destination) -> None:
    """Measures all steps, one after another."""
    work = (folder / f"{events}-events").absolute()
    work.mkdir(parents=True)
    try:
        generate(work / "old.parquet", events, 0, _DAYS * _DAY, seed=1)
        generate(work / "new.parquet", events, _DAYS * _DAY, 3 * _DAY, seed=2, share=_SHARE)
        rows = [_measure(step, events, work) for step in _STEPS]
    finally:
        shutil.rmtree(work)
    by_step = {row["step"]: row for row in rows}
    build, added, read = (by_step[name] for name in ("build", "append", "read"))
    size = f"{events:,} events"
    claims = [
        at_most(f"{size}: peak memory of the build", _MEMORY, build["peak_bytes"] / 2**30, "GiB"),
        at_most(
            f"{size}: time of appending {added['events']:,}, to that of the build",
            _APPEND, 100 * added["seconds"] / build["seconds"], "%",
        ),
        at_least(
            f"reading batches of {_BATCH:,} anchors, up to {_LONGEST_HISTORY:,} events of 3 pools",
            _READ, read["samples_per_second"]["median"], "samples/s of a process",
        ),
    ]  # fmt: skip
    if trial:
        show_claims(claims)
        return
    command = f"freescale bench store --events {events}"
    write("store", "cpu", command, rows, claims, ["numpy", "pyarrow"], to=to)


def generate(path: Path, events: int, first: int, span: int, seed: int, share: float = 1.0) -> None:
    """Histories of users in a span of time: about `events`, or a `share` of them for each user."""
    random, lengths = np.random.default_rng(seed), np.random.default_rng(0)
    sigma = np.sqrt(2 * np.log(_MEAN / _MEDIAN))
    users = max(1, round(events / _MEAN))
    counts = np.exp(lengths.normal(np.log(_MEDIAN), sigma, users)).clip(2, _LONGEST)
    counts = np.maximum(1, counts * share).astype(np.int64)
    schema = pa.schema(
        [("user_id", pa.int64())]
        + [(name, pa.list_(pa.int64())) for name in ("item_id", "timestamp", "action", "listened")]
    )
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for low in range(0, users, _GROUP):
            own = counts[low : low + _GROUP]
            offsets = pa.array(np.append(0, np.cumsum(own)), pa.int32())
            total = int(own.sum())
            # Times of all users at once: sorted by user, then by time.
            times = np.sort(
                np.repeat(np.arange(len(own)), own) * span + random.integers(0, span, total)
            )
            items = (_ITEMS * random.random(total) ** 3).astype(np.int64)
            values = {
                "item_id": items,
                "timestamp": _START + first + times % span,
                "action": random.choice(_ACTIONS, total, p=_SHARES),
                "listened": random.integers(0, 2, total),
            }
            columns = [pa.array(np.arange(low, low + len(own)))]
            columns += [pa.ListArray.from_arrays(offsets, pa.array(v)) for v in values.values()]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=_GROUP)


def _measure(step: str, events: int, work: Path) -> Row:
    environment = {**os.environ, "PYTHONPATH": package_path()}
    command = [sys.executable, "-m", __name__, step, str(work)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    row = {"step": step, **json.loads(done.stdout)}
    print(row, flush=True)
    return row


def _build(work: Path) -> Row:
    store = build_store(HistoriesFile(work / "old.parquet"), work / "store")
    bytes_ = sum(path.stat().st_size for path in store.folder.rglob("*.npy"))
    return {"events": store.num_events, "store_bytes": bytes_}


def _append(work: Path) -> Row:
    before = EventStore(work / "store").num_events
    store = append_to_store(work / "store", HistoriesFile(work / "new.parquet"))
    return {"events": store.num_events - before, "segments": len(store.segments)}


def _index(work: Path) -> Row:
    """The samples of the last ten days."""
    store, spec = EventStore(work / "store"), _make_spec(work, 10)
    windows = spec.windows
    index = WindowIndex(store, spec.make_rule(_sample()))
    index.prepare(windows.start, windows.stop)
    return {"samples": sum(len(index.load(number)) for number in windows)}


def _read(work: Path) -> Row:
    """Batches of the last but one window, evenly spaced."""
    data = Histories(
        work / "old.parquet", _BATCH, sample=_sample(), split=SplitSpec("windows", 0),
        read=ReadSpec(), time=_make_spec(work, 2),
    )  # fmt: skip
    last = max(1, data.stop - 1)  # the last batch may be smaller
    numbers = np.unique(np.linspace(0, last - 1, _BATCHES).astype(int)).tolist()
    data.batch(numbers[0])
    rates, lengths = [], []
    for number in numbers:
        begun = time.perf_counter()
        batch = data.batch(number)
        rates.append(len(batch) / (time.perf_counter() - begun))
        lengths.append(float(batch.sequences["history"].lengths.float().mean()))
    return {
        "batches": len(rates),
        "samples_per_second": spread(rates),
        "mean_history": statistics.fmean(lengths),
    }


_STEPS = {
    "build": _build,
    "index": _index,
    "append": _append,
    "index after append": _index,
    "read": _read,
}


def _sample() -> SampleSpec:
    return SampleSpec("ranking", ("listened",), _LONGEST_HISTORY, candidates=1)


def _make_spec(work: Path, days: int) -> TimeSpec:
    """The last days of the store."""
    last = EventStore(work / "store").last_time // _DAY
    windows = range(last - days + 1, last + 1)
    return TimeSpec(work / "store", _DAY, windows, (1,), 100, _POOLS)


def main(step: str, work: str) -> None:
    """Makes one step in this process. Prints its time and memory as JSON."""
    libraries, begun = read_peak_memory(), time.perf_counter()
    row: dict[str, Any] = _STEPS[step](Path(work))
    seconds = time.perf_counter() - begun
    row |= {"seconds": seconds, "peak_bytes": read_peak_memory(), "libraries_bytes": libraries}
    print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
