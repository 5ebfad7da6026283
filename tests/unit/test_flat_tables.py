"""`FlatTable` and `Schema` against the rows of the table: every row once, statistics of the
training part alone, bad values by their place."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from helpers.flat import FEATURES, TEST, TRAIN, make_table, write_table

from freescale import Schema
from freescale.data import FlatTable, ReadSpec
from freescale.data.flat import schema as schema_module
from freescale.data.flat import table as table_module

LABELS = "paid,click,late=day>=3"


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(table_module, "_GROUP", 16)


@pytest.fixture
def data(tmp_path, small_groups):
    file = write_table(tmp_path / "table.parquet")
    fitted = Schema.infer(file, FEATURES, where=TRAIN).fit(file, where=TRAIN)

    def read(rank=0, world=1, batch=32, epochs=1, seed=0, start=0, **options):
        spec = ReadSpec(epochs=epochs, seed=seed, start=start, shuffle_groups=3)
        given = {"labels": LABELS, "weights": {"click": "hour"}} | options
        return FlatTable(
            file, fitted, batch, rank=rank, world=world, read=spec, cache=tmp_path, **given
        )

    return file, fitted, read


def list_rows(batch):
    return [int(row) - 1 for row in batch.dense["labels"][:, 0]]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_an_epoch_has_every_row_once(data, world):
    _, _, read = data
    one, ranks = list(read(epochs=2)), [list(read(rank, world, epochs=2)) for rank in range(world)]
    steps = [len(batches) for batches in ranks]
    assert steps == [14] * world  # 203 rows in batches of 32, twice
    orders = []
    for number, whole in enumerate(one):
        parts = [list_rows(batches[number]) for batches in ranks]
        assert sum(parts, []) == list_rows(whole)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        orders += list_rows(whole)
    first, second = orders[:203], orders[203:]
    assert sorted(first) == sorted(second) == list(range(203)) != first
    assert first != second
    assert [list_rows(batch) for batch in read(seed=0)] == [list_rows(batch) for batch in one[:7]]
    assert [list_rows(batch) for batch in read(seed=1)] != [list_rows(batch) for batch in one[:7]]


def test_a_rank_may_have_no_row_of_the_last_batch(data):
    _, _, read = data
    last = [list(read(rank, 4, batch=101))[-1] for rank in range(4)]  # of one row
    assert [len(batch) for batch in last] == [0, 0, 0, 1]
    assert [float(batch.weights["paid"].sum()) for batch in last] == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_a_resume_on_other_ranks_continues_the_sequence(data, before, after):
    _, _, read = data
    whole = [list_rows(batch) for batch in read(epochs=2)]
    sources = [read(rank, before, epochs=2) for rank in range(before)]
    iterators = [iter(source) for source in sources]
    found = [sum((list_rows(next(each)) for each in iterators), []) for _ in range(9)]
    state = json.loads(json.dumps(sources[0].state_dict()))
    assert state["next"] == 9 and sources[0].state_dict(next=4)["next"] == 4
    resumed = [read(rank, after, epochs=2) for rank in range(after)]
    for source in resumed:
        source.load_state_dict(state)
    found += [sum(map(list_rows, parts), []) for parts in zip(*resumed, strict=True)]
    assert found == whole
    other = read(epochs=2, where=TEST)
    with pytest.raises(ValueError, match="saved with fingerprint .*resume with the same data"):
        other.load_state_dict(state)


def test_a_batch_has_the_values_of_its_rows(data):
    file, fitted, read = data
    rows = make_table().to_pylist()
    items = sorted({row["item_id"] for row in rows if row["day"] < 6})
    hours = sorted({str(row["hour"]) for row in rows if row["day"] < 6})
    assert fitted.rows["item"] == len(items) + 3  # nothing, missing, unknown
    for batch in pickle.loads(pickle.dumps(read())):
        picked = [rows[row] for row in list_rows(batch)]
        dense = batch.dense
        expected = [items.index(r["item_id"]) + 3 if r["item_id"] in items else 2 for r in picked]
        assert dense["item"].tolist() == expected
        assert dense["item_own"].tolist() == [r["item_id"] in items for r in picked]
        assert dense["hour"].tolist() == [hours.index(str(r["hour"])) + 3 for r in picked]
        columns = {name: [r[name] for r in picked] for name in rows[0]}
        assert dense["labels"][:, 1].tolist() == columns["click"]
        assert dense["labels"][:, 2].tolist() == [day >= 3 for day in columns["day"]]
        assert batch.weights["click"].tolist() == columns["hour"]
        assert batch.weights["paid"].tolist() == [1.0] * len(picked)
        block = pa.RecordBatch.from_pydict(columns)
        wanted = [each.encode(block) for each in fitted.tables["item_features"]]
        assert dense["item_features"].tolist() == np.concatenate(wanted, 1).tolist()
    assert dense["item_features"].shape[1] == 4 and dense["hour"].dtype == torch.int64


def test_rows_of_the_test_part_decide_nothing(tmp_path):
    """Their categories, numbers and ids change, and the fitted schema does not."""
    table = make_table()
    test = np.array([day >= 6 for day in table["day"].to_pylist()])
    changed = {
        "item_id": ["new" if t else x for t, x in zip(test, table["item_id"].to_pylist())],
        "category": ["odd" if t else x for t, x in zip(test, table["category"].to_pylist())],
        "price": np.where(test, 1e6, table["price"]),
        "tags": ["a|b|c|d" if t else x for t, x in zip(test, table["tags"].to_pylist())],
        "hour": np.where(test, 77, table["hour"]),
    }
    other = pa.table({n: changed.get(n, table[n]) for n in table.column_names})
    texts = []
    for number, each in enumerate((table, other)):
        file = write_table(tmp_path / f"{number}.parquet", each)
        for features in (FEATURES, ""):
            schema = Schema.infer(file, features, labels="click,paid", where=TRAIN)
            schema.fit(file, where=TRAIN).write(tmp_path / "fitted.json")
            texts.append((tmp_path / "fitted.json").read_text())
    assert texts[:2] == texts[2:] and "c1" in texts[0] and "odd" not in texts[0]
    kept = Schema.read(tmp_path / "fitted.json")
    new = FlatTable(tmp_path / "1.parquet", kept, 8, where=TEST, cache=tmp_path)
    for batch in new:  # of the next days: unknown items and hours, by the same statistics
        assert set(batch.dense["item"].tolist()) == set(batch.dense["hour"].tolist()) == {2}
        assert not batch.dense["item_own"].any() and "labels" not in batch.dense


def test_fitting_by_blocks_is_fitting_at_once(tmp_path, monkeypatch):
    file = write_table(tmp_path / "table.parquet")
    pa.csv.write_csv(make_table(), tmp_path / "table.csv")
    schema = Schema.infer(make_table(), FEATURES)
    at_once = schema.fit(make_table())
    monkeypatch.setattr("freescale.data.ingest.tables._ROWS", 13)
    assert schema.fit(file).tables == at_once.tables
    assert schema.fit([file, file]).rows == at_once.rows
    assert schema.fit(tmp_path / "table.csv").tables == at_once.tables
    monkeypatch.setattr(schema_module, "_NUMBERS", 60)  # every 4th of 203 rows
    price = {f.feature.name: f for f in schema.fit(file).tables["item_features"]}["price"]
    sampled = schema.fit(make_table().take(list(range(0, 203, 4)))).tables["item_features"][1]
    assert price.edges == sampled.edges


def test_a_schema_is_written_and_read(tmp_path):
    schema = Schema.infer(make_table(), FEATURES + ",category*hour=cross:50")
    schema.write(tmp_path / "features.toml")
    assert "# 5 values, 10.3% missing: categorical" in (tmp_path / "features.toml").read_text()
    assert Schema.read(tmp_path / "features.toml") == schema
    fitted = schema.fit(make_table())
    fitted.write(tmp_path / "features.json")
    assert Schema.read(tmp_path / "features.json").tables == fitted.tables
    (tmp_path / "short.toml").write_text("[item.category]\n[event.hour]\nkind = 'numeric'\n")
    short = Schema.read(tmp_path / "short.toml").fit(make_table())  # with the kind that it has
    assert [each.kind for each in short.features] == ["categorical", "numeric"]
    every = Schema.infer(make_table(), labels="click,rich=paid>5", where=TRAIN)
    assert [each.name for each in every.features] == ["category", "price", "tags", "hour"]
    renamed = make_table().rename_columns(["reader", "sku", *make_table().column_names[2:]])
    rows = schema.fit(renamed, columns="user=reader,item=sku").rows
    assert rows == fitted.rows


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("paid", float("nan"), "row 131: column 'paid' holds nan, not a number; fix or drop"),
        ("paid", float("inf"), "row 131: column 'paid' holds inf, not a number; fix or drop"),
        ("click", None, "row 131: column 'click' is missing"),
        ("price", float("inf"), "row 131: column 'price' holds inf, and numbers are finite; fix"),
        ("hour", -1, "row 131: column 'hour' holds -1, and weights are 0 or more; fix that value"),
    ],
)
def test_a_bad_value_is_refused_with_its_place(data, tmp_path, column, value, message):
    _, fitted, _ = data
    table = make_table()
    values = table[column].to_pylist()
    values[130] = value
    kind = pa.float64() if isinstance(value, float) else pa.int64()
    place = table.column_names.index(column)
    file = write_table(
        tmp_path / "bad.parquet", table.set_column(place, column, pa.array(values, kind))
    )
    with pytest.raises(ValueError, match=message) as error:
        FlatTable(file, fitted, 8, labels=LABELS, weights={"click": "hour"}, cache=tmp_path)
    assert str(error.value).startswith(f"{file}, ")
    assert not list(tmp_path.glob("*bad*/")) and len(list(tmp_path.glob("table-*"))) == 0


def test_mistakes_are_named(data, tmp_path):
    file, fitted, read = data
    with pytest.raises(ValueError, match=r"column 'colour' is missing; the file has user_id"):
        Schema.infer(file, "item.colour")
    with pytest.raises(ValueError, match=r"column 'like' is missing; the file has user_id"):
        read(labels="like", weights={})
    with pytest.raises(ValueError, match="weights of like: the labels are paid"):
        read(labels="paid", weights={"like": "hour"})
    with pytest.raises(ValueError, match="column 'category' is missing"):
        write_table(tmp_path / "less.parquet", make_table().drop_columns(["category"]))
        FlatTable(tmp_path / "less.parquet", fitted, 8, cache=tmp_path)
    for where in ("day", "day<1,hour<2"):
        with pytest.raises(ValueError, match="is no comparison; write one, as 'day<20'"):
            Schema.infer(file, where=where)
    with pytest.raises(ValueError, match="no row is left"):
        read(where="day>90")
    with pytest.raises(ValueError, match="not fitted: call fit"):
        FlatTable(file, Schema.infer(file, "hour"), 8, cache=tmp_path)
    with pytest.raises(ValueError, match="feature event.labels is a column of every batch"):
        table = make_table().rename_columns(["labels", *make_table().column_names[1:]])
        Schema.infer(table, "labels=numeric").fit(table)
    with pytest.raises(ValueError, match="rank is 2; with 2 ranks"):
        read(rank=2, world=2)
