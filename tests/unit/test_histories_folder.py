"""A folder of histories files is read as one, where it is, by any number of ranks."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from freescale.data import Histories, ReadSpec, prepare
from freescale.data.histories import HistoriesFile
from freescale.data.store.build import build_store
from freescale.data.synthetic.generate import generate


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    """A histories file, and its rows in files of a folder, as Spark would write them."""
    whole, folder = tmp_path / "whole.parquet", tmp_path / "parts"
    generate(whole, users=200, items=80, median=12, cap=30, seed=1)
    table = pq.read_table(whole).replace_schema_metadata(None)
    (folder / "day=1").mkdir(parents=True)
    (folder / "_SUCCESS").touch()
    (folder / "_temporary.parquet").write_bytes(b"unfinished")
    for number, start in enumerate(range(0, 200, 70)):
        path = folder / ("day=1" if number else ".") / f"part-{number}.parquet"
        pq.write_table(table.slice(start, 70), path, row_group_size=25)
    return whole, folder


def test_rows_are_those_of_one_file(parts):
    whole, folder = parts
    one, many = HistoriesFile(whole), HistoriesFile(folder)
    assert (many.num_samples, many.num_items) == (200, one.num_items) and many.num_groups == 9
    columns = ("item_id", "timestamp")
    names = [path.name for path in many.file.paths]
    assert names == ["part-1.parquet", "part-2.parquet", "part-0.parquet"]  # by the whole path
    users = np.concatenate([many.read_users(group) for group in range(9)])
    expected = pq.read_table(whole).to_pylist()
    by_user = {row["user_id"]: row for row in expected}
    at = 0
    for group in range(9):
        found = many.read(group, columns)
        for start, stop in zip(found.offsets, found.offsets[1:]):
            row = by_user[users[at]]
            assert found.values["item_id"][start:stop].tolist() == row["item_id"]
            assert found.values["timestamp"][start:stop].tolist() == row["timestamp"]
            at += 1
    assert at == 200 and many.find_times() == one.find_times()


def test_batches_are_a_function_of_the_files_and_the_seed(parts):
    _, folder = parts

    def read(world):
        read = ReadSpec(seed=3, shuffle_groups=2, kept_bytes=0)
        ranks = [Histories(folder, 16, rank=r, world=world, read=read) for r in range(world)]
        ranks[0] = pickle.loads(pickle.dumps(ranks[0]))  # as a worker gets it
        batches = [[each.batch(number) for each in ranks] for number in range(13)]
        return [
            torch.cat([batch.sequences["history"].values for batch in batch_]) for batch_ in batches
        ]

    for one, other in zip(read(1), read(3), strict=True):
        assert torch.equal(one, other)


def test_prepare_leaves_a_folder_of_histories_where_it_is(parts, tmp_path):
    _, folder = parts
    pq.write_table(pa.table({"text": ["a"]}), folder / "vocabulary.parquet")
    cache = tmp_path / "cache"
    assert prepare(folder, cache) == folder and not cache.exists()
    with pytest.raises(ValueError, match="give the folder"):
        prepare(f"{folder}/day=1/*.parquet", cache)


def test_a_store_of_a_folder_has_all_events(parts, tmp_path):
    whole, folder = parts
    counts = [build_store(p, tmp_path / n).num_events for p, n in ((whole, "a"), (folder, "b"))]
    assert counts[0] == counts[1] > 0


def test_files_must_be_alike_and_errors_name_the_file(parts):
    whole, folder = parts
    table = pq.read_table(folder / "part-0.parquet")
    other = folder / "zz.parquet"
    pq.write_table(table.rename_columns(["user_id", "item_id", "when"]), other)
    with pytest.raises(
        ValueError, match=r"zz.parquet: the columns are .*when.*write all files alike"
    ):
        HistoriesFile(folder)
    pq.write_table(pa.table({"user": [1]}), other)
    with pytest.raises(ValueError, match=r"zz.parquet: not a histories file"):
        HistoriesFile(folder)
    times = [row[::-1] for row in table["timestamp"].to_pylist()]
    place = table.column_names.index("timestamp")
    back = table.set_column(place, "timestamp", pa.array(times, pa.list_(pa.int64())))
    pq.write_table(back.cast(table.schema), other)
    file = HistoriesFile(folder)
    with pytest.raises(ValueError, match=r"zz.parquet: user \d+ has timestamp"):
        file.read(file.num_groups - 1, ("item_id", "timestamp"))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no Parquet file"):
        HistoriesFile(tmp_path)


def test_files_that_change_change_the_fingerprint(parts):
    _, folder = parts
    before = HistoriesFile(folder).fingerprint
    pq.write_table(pq.read_table(folder / "part-0.parquet").slice(1), folder / "part-0.parquet")
    assert HistoriesFile(folder).fingerprint != before
