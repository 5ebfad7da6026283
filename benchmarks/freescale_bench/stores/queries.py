"""Histories that the queries of the documentation make in DuckDB and in Spark, against those of
`freescale.data.prepare`: row by row, and the metrics of one model on each."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from freescale.data import prepare
from freescale.data.histories import HistoriesFile
from freescale_bench.common.repository import require_repository
from freescale_bench.common.results import Destination, Row, at_most, show_claims, write

_AT_ONCE = 5_000_000  # events that are generated at a time
_USERS_EACH, _ITEMS = 20, 1000  # events of a user on average; items
_CLOSE = 1e-6  # of metrics: users come in another order, and so do sums
_MODEL = ["--device", "cpu", "--width", "8", "--layers", "1", "--max-length", "10", "--steps", "20"]
_MODEL += ["--global-batch", "256", "--eval-batch", "8192", "--negatives", "64"]


def bench_queries(events: int, folder: Path, trial: bool, to: Destination) -> None:
    folder.mkdir(parents=True)
    try:
        _generate(folder / "events.parquet", events)
        rows = [_measure(name, make, folder) for name, make in _MAKERS.items()]
        expected = _read_sorted(Path(rows[0]["made"]))
        for row in rows[1:]:
            row["histories"], row["differ"] = _compare(expected, _read_sorted(Path(row["made"])))
            print(row, flush=True)
        del expected
        _run("train", "--data", rows[0]["made"], "--folder", str(folder / "run"), *_MODEL)
        for row in rows:
            _run("eval", str(folder / "run"), "--data", row["made"])
            newest = max((folder / "run").glob("eval-test*.json"), key=lambda p: p.stat().st_mtime)
            row["metrics"] = json.loads(newest.read_text())["quality"]["model"]
            newest.unlink()
            row.pop("made")
    finally:
        shutil.rmtree(folder)
    own = rows[0]["metrics"]
    claims = []
    for row in rows[1:]:
        where = f"{events:,} events, {row['engine']}"
        away = max(abs(row["metrics"][name] - own[name]) for name in own)
        text = f"{where}: of {row['histories']:,} histories, those that differ"
        claims += [at_most(text, 0, row["differ"], "histories")]
        claims += [at_most(f"{where}: largest difference of a metric, 1e-6", 1, away / _CLOSE, "")]
    if trial:
        show_claims(claims)
        return
    command = f"freescale bench stores queries --events {events}"
    packages = ["pyarrow", "duckdb", "pyspark"]
    write("stores-queries", "cpu", command, rows, claims, packages, to=to)


def _generate(path: Path, events: int) -> None:
    """Interactions in no order, with equal times and users of one event."""
    random, users = np.random.default_rng(0), events // _USERS_EACH
    kinds = [(name, pa.int64()) for name in ("user_id", "item_id", "timestamp")]
    with pq.ParquetWriter(path, pa.schema(kinds)) as writer:
        for first in range(0, events, _AT_ONCE):
            count = min(_AT_ONCE, events - first)
            values = (
                (users * random.random(count) ** 1.5).astype(np.int64),
                (_ITEMS * random.random(count) ** 3).astype(np.int64),
                1_600_000_000 + random.integers(0, max(events // 50, 1), count),
            )
            columns = [pa.array(each) for each in values]
            writer.write_table(pa.table(columns, schema=pa.schema(kinds)), row_group_size=1 << 20)


def _measure(name: str, make: Callable[[Path], Path], folder: Path) -> Row:
    begun = time.perf_counter()
    made = make(folder)
    row = {"engine": name, "seconds": time.perf_counter() - begun, "made": str(made)}
    print(row, flush=True)
    return row


def _find_queries() -> tuple[str, str]:
    page = require_repository() / "docs" / "guide" / "warehouse.md"
    duck, spark = re.findall(r"```sql\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return duck, spark


def _prepare(folder: Path) -> Path:
    return prepare(folder / "events.parquet", folder / "cache")


def _query_duckdb(folder: Path) -> Path:
    import duckdb

    query, made = _find_queries()[0], folder / "duckdb"
    connection = duckdb.connect(str(folder / "duckdb.db"))
    connection.execute("SET threads = 2; SET memory_limit = '6GB'")
    query = query.replace("'events.parquet'", f"'{folder / 'events.parquet'}'")
    connection.execute(query.replace("'histories'", f"'{made}'"))
    connection.close()
    return made


def _query_spark(folder: Path) -> Path:
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "5g")
        .config("spark.local.dir", str(folder / "spark-work"))
        .getOrCreate()
    )
    made = folder / "spark"
    try:
        table = session.read.parquet(str(folder / "events.parquet"))
        rows = table.selectExpr("*", "monotonically_increasing_id() AS position")
        rows.createOrReplaceTempView("events")
        session.sql(_find_queries()[1]).write.parquet(str(made))
    finally:
        session.stop()
    return made


_MAKERS = {"prepare": _prepare, "DuckDB": _query_duckdb, "Spark": _query_spark}


def _read_sorted(path: Path) -> pa.Table:
    """All rows, in the order of users."""
    file, parts = HistoriesFile(path), []
    for number in range(file.num_groups):
        table = file.file.read(number, ("user_id", "item_id", "timestamp"))
        kinds = [pa.int64(), pa.large_list(pa.int64()), pa.large_list(pa.int64())]
        parts.append(table.cast(pa.schema(zip(table.schema.names, kinds, strict=True))))
    whole = pa.concat_tables(parts).select(["user_id", "item_id", "timestamp"])
    return whole.take(pc.sort_indices(whole.column("user_id"))).combine_chunks()


def _compare(expected: pa.Table, found: pa.Table) -> tuple[int, int]:
    """Histories, and those that are not in both, with the same events in the same order."""
    if not expected.column("user_id").equals(found.column("user_id")):
        users = [set(table.column("user_id").to_pylist()) for table in (expected, found)]
        return len(expected), len(users[0] ^ users[1]) or len(expected)
    differs = np.zeros(len(expected), bool)
    for name in ("item_id", "timestamp"):
        first, second = (table.column(name).combine_chunks() for table in (expected, found))
        lengths = [pc.list_value_length(each).to_numpy() for each in (first, second)]
        differs |= lengths[0] != lengths[1]
        if not differs.any():
            values: list[Any] = [pc.list_flatten(each).to_numpy() for each in (first, second)]
            rows = np.repeat(np.arange(len(differs)), lengths[0])
            differs[rows[values[0] != values[1]]] = True
    return len(expected), int(differs.sum())


def _run(*arguments: str) -> None:
    command = [sys.executable, "-m", "freescale", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
