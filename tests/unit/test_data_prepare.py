"""`prepare` against a plain Python oracle; the cache; failures; the bound on memory."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.data import histories_writer, prepare
from freescale.data.ingest import history_builder, tables

events = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 30), st.integers(-5, 5), st.integers(0, 9)),
    min_size=1,
    max_size=120,
)


def write(path: Path, rows) -> Path:
    names = ("user_id", "item_id", "timestamp", "score")
    columns = {n: pa.array([r[i] for r in rows], pa.int64()) for i, n in enumerate(names)}
    pq.write_table(pa.table(columns), path, row_group_size=17)
    return path


def entries(cache: Path) -> list[Path]:
    """What a cache holds beside the digests that it remembers."""
    return [path for path in cache.iterdir() if path.name != "digests"]


def oracle(rows) -> tuple[list[dict], int]:
    users = defaultdict(list)
    for row in rows:
        users[row[0]].append(row)
    kept = []
    for user, mine in users.items():
        mine = sorted(mine, key=lambda r: r[2])  # stable
        if len(mine) >= 2:
            columns = {
                n: [r[i] for r in mine]
                for i, n in enumerate(("item_id", "timestamp", "score"), start=1)
            }
            kept.append({"user_id": user, **columns})
    return sorted(kept, key=lambda u: (u["timestamp"][-1], u["user_id"])), len(users) - len(kept)


@settings(max_examples=60, deadline=None)
@given(rows=events, bucket=st.sampled_from([3, 64, 2_000_000]))
def test_matches_the_oracle(rows, bucket):
    expected, dropped = oracle(rows)
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder) / "e.parquet", rows)
        if not expected:
            with pytest.raises(ValueError, match="no user has 2 or more events"):
                prepare(source, Path(folder) / "cache", bucket_events=bucket)
            assert entries(Path(folder) / "cache") == []
            return
        made = prepare(source, Path(folder) / "cache", bucket_events=bucket)
        assert pq.read_table(made).to_pylist() == expected
        about = json.loads(pq.read_metadata(made).metadata[b"freescale"])
        assert about["num_items"] == max(r[1] for r in rows) + 1
        assert about["num_users"] == len(expected)
        assert about["num_events"] == sum(len(u["item_id"]) for u in expected)
        assert about["dropped_users"] == dropped
        assert about["columns"] == ["item_id", "timestamp", "score"]
        assert about["version"] == 1
        assert [p.name for p in made.parent.iterdir()] == ["histories.parquet"]
        assert entries(made.parent.parent) == [made.parent]


def large(path: Path, count: int, ties: bool = False) -> Path:
    """`count` events; about 40 a user, one user with a tenth of all; in random order."""
    generator = np.random.default_rng(count)
    users = generator.integers(0, count // 40, count)
    users[: count // 10] = 3
    times = np.zeros(count, np.int64) if ties else generator.integers(0, 1 << 40, count)
    columns = {
        "user_id": users,
        "item_id": generator.integers(0, 1000, count),
        "timestamp": times,
        "score": users,
    }
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("fan_out", [3, 128])
def test_many_buckets_recursion_and_ties(tmp_path, monkeypatch, ties, fan_out):
    monkeypatch.setattr(
        history_builder, "_FAN_OUT", fan_out
    )  # 3: both partitions recurse several times
    monkeypatch.setattr(history_builder, "_SAMPLES", 4)
    source = large(tmp_path / "e.parquet", 20_000, ties)
    buckets = []
    whole = history_builder._group_events
    monkeypatch.setattr(
        history_builder, "_group_events", lambda table: (buckets.append(table), whole(table))[1]
    )
    made = prepare(source, tmp_path / "cache", bucket_events=400)
    for bucket in buckets:  # bounded, whatever the one long history that it may hold besides
        longest = max(
            bucket.column("user_id").value_counts().to_pylist(), key=lambda c: c["counts"]
        )
        assert bucket.num_rows - longest["counts"] <= 400
    flat = pq.read_table(source)
    rows = list(
        zip(
            *(flat.column(n).to_pylist() for n in ("user_id", "item_id", "timestamp", "score")),
            strict=True,
        )
    )
    assert pq.read_table(made).to_pylist() == oracle(rows)[0]


def test_row_groups_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(histories_writer, "GROUP_EVENTS", 1500)
    rows = [(u, e, e, 0) for u in range(700) for e in range(2 if u < 600 else 40)]
    one = prepare(write(tmp_path / "e.parquet", rows), tmp_path / "one")
    many = prepare(tmp_path / "e.parquet", tmp_path / "many", bucket_events=64)
    file = pq.ParquetFile(one)
    groups = [
        file.read_row_group(g, ["item_id"]).column("item_id").to_pylist()
        for g in range(file.num_row_groups)
    ]
    assert max(len(g) for g in groups) == 256
    for group in groups[:-1]:
        sizes = [len(user) for user in group]
        assert sum(sizes[:-1]) < 1500 and (len(group) == 256 or sum(sizes) >= 1500)
    assert one.read_bytes() == many.read_bytes()  # the buckets leave no trace


def test_histories_over_files_of_different_units_are_in_the_order_of_time(tmp_path):
    paths = []
    for unit, scale, items in (("us", 1_000_000, (0, 1)), ("ms", 1_000, (2, 3))):
        columns = {
            "user_id": [1, 1],
            "item_id": items,
            "timestamp": pa.array([i * scale for i in items], pa.timestamp(unit)),
        }
        paths.append(tmp_path / f"{unit}.parquet")
        pq.write_table(pa.table(columns), paths[-1])
    made = pq.read_table(prepare(paths, tmp_path / "c")).to_pylist()
    assert made == [
        {"user_id": 1, "item_id": [0, 1, 2, 3], "timestamp": [0, 1_000_000, 2_000_000, 3_000_000]}
    ]


def test_cache_is_used_and_told_apart(tmp_path):
    source = write(tmp_path / "e.parquet", [(1, 2, 3, 0), (1, 3, 4, 0)])
    stages = []
    first = prepare(
        source, tmp_path / "c", progress=lambda stage, share: stages.append((stage, share))
    )
    assert [s for s, _ in stages] == ["hash", "read", "sort", "write"] and {
        share for _, share in stages
    } == {1.0}
    before = first.stat().st_mtime_ns
    assert prepare(source, tmp_path / "c") == first and first.stat().st_mtime_ns == before
    wider = prepare(source, tmp_path / "c", num_items=50)
    assert (
        wider != first
        and json.loads(pq.read_metadata(wider).metadata[b"freescale"])["num_items"] == 50
    )
    write(source, [(1, 2, 3, 0), (1, 3, 4, 0), (1, 3, 4, 0)])
    assert prepare(source, tmp_path / "c") not in (first, wider)


def test_failure_leaves_nothing(tmp_path, monkeypatch):
    source = write(tmp_path / "e.parquet", [(1, 2, 3, 0), (1, 9, 4, 0)])
    with pytest.raises(
        ValueError,
        match=(
            r"e.parquet: item id 9 is not below num_items 9; raise "
            r"num_items"
        ),
    ):
        prepare(source, tmp_path / "c", num_items=9)
    assert entries(tmp_path / "c") == []

    def broken(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(
            source,
            tmp_path / "c",
            progress=lambda stage, share: broken() if stage == "write" else None,
        )
    assert entries(tmp_path / "c") == []
    with pytest.raises(ValueError, match="num_items is 0"):
        prepare(source, tmp_path / "c", num_items=0)


def test_histories_are_returned_as_they_are(tmp_path):
    source = write(tmp_path / "e.parquet", [(1, 2, 3, 0), (1, 3, 4, 0)])
    made = prepare(source, tmp_path / "c")
    assert prepare(made, tmp_path / "other") == made
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="item id 3 is not below num_items 2"):
        prepare(made, tmp_path / "other", num_items=2)
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"user_id": [1], "item_id": [[1, 2]], "timestamp": [[1, 2]]}), foreign)
    assert prepare(foreign, tmp_path / "other") == foreign
    pq.write_table(pa.table({"user_id": [1], "item_id": [[1, 2]]}), foreign)
    with pytest.raises(ValueError, match="'timestamp' is missing"):
        prepare(foreign, tmp_path / "other")
    pq.write_table(pa.table({"user_id": [1], "item_id": [["x"]], "timestamp": [[1]]}), foreign)
    with pytest.raises(ValueError, match=r"'item_id' holds list<.*string>"):
        prepare(foreign, tmp_path / "other")


def test_vocabulary_stands_beside(tmp_path):
    source = tmp_path / "ratings.csv"
    source.write_text("u1,x,5.0,2\nu2,y,1.0,1\nu1,y,3.0,1\n")
    made = prepare(source, tmp_path / "c")
    expected = {"user_id": 0, "item_id": [1, 0], "timestamp": [1, 2], "action": [6, 10]}
    assert pq.read_table(made).to_pylist() == [expected]
    vocabulary = pq.read_table(made.parent / "vocabulary.parquet").to_pylist()
    assert {(r["column"], r["id"]): r["text"] for r in vocabulary} == {
        ("user_id", 0): "u1", ("user_id", 1): "u2", ("item_id", 0): "x", ("item_id", 1): "y",
    }  # fmt: skip


def peak_of(function) -> int:
    """Bytes: peaks of what Arrow, Python and numpy allocate, and what Parquet's readers hold when
    it calls back."""
    usual = pa.default_memory_pool()
    pool, base, held = pa.proxy_memory_pool(usual), usual.bytes_allocated(), [0]
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        function(
            lambda stage, share: held.append(
                usual.bytes_allocated() - pool.bytes_allocated() - base
            )
        )
        return pool.max_memory() + tracemalloc.get_traced_memory()[1] + max(held)
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_ROWS", 10_000)
    options = {"cache": tmp_path / "c", "bucket_events": 20_000}
    peaks = []
    for count in (300_000, 1_200_000):
        generator = np.random.default_rng(0)
        columns = {
            "user_id": generator.integers(0, count // 40, count),
            "item_id": generator.integers(0, 99, count),
        }
        columns["timestamp"] = generator.integers(0, 1 << 40, count)
        source = tmp_path / f"{count}.parquet"
        pq.write_table(pa.table(columns), source)  # one row group
        peaks.append(
            peak_of(lambda report, source=source: prepare(source, progress=report, **options))
        )
    assert peaks[1] < 1.5 * peaks[0], peaks
    assert peaks[1] < 1.05 * 1_200_000 * 8, peaks  # a column of the events; pyarrow 17 needs 1.01
