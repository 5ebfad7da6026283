"""Paths in object stores, and which bytes of a Parquet file are requested. What a server answers is
in tests/integration/test_s3.py."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.data.parquet_ranges import StoredFile, find_ranges
from freescale.stores.calls import repeat
from freescale.stores.path import StorePath, as_path, is_store
from freescale.train.state.disk import parse_step


def test_paths_are_pathlib_paths_of_the_store():
    path = as_path("s3://bucket/runs/first")
    assert isinstance(path, StorePath) and isinstance(path, Path)
    assert str(path) == f"{path}" == "s3://bucket/runs/first"
    assert path.protocol == "s3" and path.key == "bucket/runs/first"
    assert str(path.parent / "second" / "x.json") == "s3://bucket/runs/second/x.json"
    assert str(path.with_name("third").with_suffix(".tmp")) == "s3://bucket/runs/third.tmp"
    assert str((path / "a" / "b").relative_to(path)) == "a/b"
    assert path.resolve() == path.absolute() == as_path(path) == pickle.loads(pickle.dumps(path))
    assert hash(path) == hash(as_path(str(path))) and path < path / "x"


def test_a_path_that_lost_a_slash_is_one_of_the_store():
    assert as_path(Path("s3://bucket/x")) == as_path("s3://bucket/x")
    assert not is_store("s3") and not is_store("data/s3:x") and not is_store("https://host/x")
    assert as_path("runs/first") == Path("runs/first")
    assert type(as_path("runs/first")) is type(Path("x"))


def test_credentials_in_a_path_are_refused_and_not_repeated():
    with pytest.raises(ValueError, match=r"^s3://\.\.\.: a path is written to logs") as refused:
        as_path("s3://test:words@bucket/x")
    assert "words" not in str(refused.value)
    assert as_path("s3://bucket/a@b").name == "a@b"


def test_a_program_that_knows_no_stores_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for act in (open, pq.read_table, np.load):
        with pytest.raises(ValueError, match="s3://bucket/x is in an object store"):
            act(as_path("s3://bucket/x"))
    assert not list(tmp_path.iterdir())


def test_folders_of_checkpoints_are_steps():
    assert parse_step(as_path("s3://b/r/step-00000100.w7")) == 100
    assert parse_step(Path("step-00000100.w7")) is None
    assert parse_step(as_path("s3://b/r/step-00000100.replaced")) is None


@pytest.mark.parametrize(("failures", "succeeds"), [(0, True), (7, True), (8, False)])
def test_calls_are_repeated(monkeypatch, failures, succeeds):
    pauses, left = [], [failures]
    monkeypatch.setattr("time.sleep", pauses.append)

    def call():
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionError("reset")
        return "answer"

    if succeeds:
        assert repeat("s3://b/x", call) == "answer" and len(pauses) == failures
        assert failures < 5 or pauses[4] > 2 * pauses[0]
    else:
        with pytest.raises(OSError, match="s3://b/x: reset"):
            repeat("s3://b/x", call)


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError, FileExistsError])
def test_refusals_are_not_repeated(error):
    calls = []

    def call():
        calls.append(1)
        raise error("no")

    with pytest.raises(error):
        repeat("s3://b/x", call)
    assert len(calls) == 1


def test_row_groups_are_read_from_the_ranges_of_their_columns(tmp_path):
    """`before` is as large as what is read: it is not requested with it."""
    values = np.random.default_rng(0).integers(0, 1 << 60, (4, 100_000))
    table = pa.table(dict(zip(("a", "before", "b", "c"), values)))
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=50_000, compression="none")
    content, about = (tmp_path / "x.parquet").read_bytes(), pq.read_metadata(tmp_path / "x.parquet")
    for group in range(2):
        ranges = find_ranges(about.row_group(group), ("a", "b", "c"))
        assert len(ranges) == 2
        held = {begin: content[begin:end] for begin, end in ranges}
        assert sum(map(len, held.values())) < 0.8 * len(content) / 2
        # the path is not asked: all that is read is held
        file = StoredFile(as_path("s3://nowhere/x"), held, len(content))
        parquet = pq.ParquetFile(file, metadata=about, pre_buffer=False)
        found = parquet.read_row_group(group, columns=["a", "b", "c"])
        assert found.equals(table.slice(group * 50_000, 50_000).select(["a", "b", "c"]))
