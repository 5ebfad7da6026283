"""The queries of docs/guide/warehouse.md make the histories that FreeScale makes itself, in DuckDB
and Spark, and train the same."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.command import started

from freescale.data import prepare
from freescale.data.histories import HistoriesFile

ROOT = Path(__file__).resolve().parents[2]
EVENTS = int(os.environ.get("FREESCALE_QUERY_EVENTS", 200_000))
PAGE = (ROOT / "docs" / "guide" / "warehouse.md").read_text(encoding="utf-8")
DUCKDB, SPARK = re.findall(r"```sql\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interactions in no order, with equal times and users of one event."""
    random = np.random.default_rng(0)
    users = random.zipf(1.3, EVENTS) % (EVENTS // 20)
    path = tmp_path_factory.mktemp("events") / "events.parquet"
    table = pa.table(
        {
            "user_id": users,
            "item_id": random.integers(0, 1000, EVENTS),
            "timestamp": 1_600_000_000 + random.integers(0, EVENTS // 50, EVENTS),
        }
    )
    pq.write_table(table, path)
    return path


def read_rows(path: Path) -> dict[int, tuple[list[int], list[int]]]:
    file, found = HistoriesFile(path), {}
    for number in range(file.num_groups):
        group = file.read(number, ("item_id", "timestamp"))
        for place, user in enumerate(file.read_users(number).tolist()):
            part = slice(*group.offsets[place : place + 2])
            assert user not in found
            found[user] = tuple(group.values[n][part].tolist() for n in ("item_id", "timestamp"))
    return found


def check(events: Path, made: Path, tmp_path: Path) -> None:
    own = prepare(events, tmp_path / "cache")
    expected, found = read_rows(own), read_rows(made)
    assert found == expected and len(found) > 100
    small = ["--device", "cpu", "--width", 8, "--layers", 1, "--negatives", 8, "--no-shuffle"]
    small += ["--steps", 5, "--global-batch", 64, "--max-length", 20]
    done = started("train", "--data", made, "--folder", tmp_path / "run", *small)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert any("test" in json.loads(line) for line in lines)


@pytest.mark.long
def test_duckdb(events: Path, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    connection = duckdb.connect()
    connection.execute("SET threads = 2")
    made = tmp_path / "histories"
    query = DUCKDB.replace("'events.parquet'", f"'{events}'").replace("'histories'", f"'{made}'")
    connection.execute(query)
    assert made.is_dir()
    check(events, made, tmp_path)


@pytest.mark.long
def test_spark(events: Path, tmp_path: Path) -> None:
    pyspark = pytest.importorskip("pyspark.sql")
    if shutil.which("java") is None:
        pytest.skip("java is missing: apt-get install default-jre-headless")
    session = (
        pyspark.SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "6g")
        .getOrCreate()
    )
    try:
        table = session.read.parquet(str(events))
        rows = table.selectExpr("*", "monotonically_increasing_id() AS position")
        rows.createOrReplaceTempView("events")
        made = tmp_path / "histories"
        session.sql(SPARK).write.parquet(str(made))
    finally:
        session.stop()
    assert len(list(made.glob("*.parquet"))) >= 2
    check(events, made, tmp_path)
