"""Features of requests that are made of several sources: their rows, and what they must not see."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from freescale.config import RunConfig
from freescale.config.features import Feature, parse_features, write_schema
from freescale.data.batches.loader import Histories
from freescale.data.features.crosses import make_keys
from freescale.data.features.fitting import fit_feature
from freescale.embedding.layout import ShardLayout, TableSpec, find_ids
from freescale.embedding.optimizers import RowWiseAdagrad
from freescale.embedding.placement import choose_placement, count_state_bytes
from freescale.random import derive, hash_name
from freescale.train.build import build_specs, load_features, prepare_data

USERS, ITEMS, EVENTS = 30, 50, 900
MISSING = hash_name("missing value of a cross")
PLACES = (  # of DLRMv4, in the order of its tables
    "user=id:1001,user*artist=cross:100000000,user*album=cross:40000000,user*hour=cross:24000000,"
    "item*hour=cross:40000000,artist*hour=cross:32000000,user*organic=cross:2000000,"
    "user*artist*hour=cross:40000000"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("crosses"), np.random.default_rng(0)
    events = {
        "user_id": random.integers(100, 100 + USERS, EVENTS),
        "item_id": random.integers(0, ITEMS, EVENTS),
        "timestamp": np.sort(random.integers(0, 9 * 86_400, EVENTS)),
        "organic": random.choice(["yes", "no"], EVENTS),
        "click": random.integers(0, 2, EVENTS),
        "action": random.integers(0, 5, EVENTS),
    }
    events["organic"][::50] = ""  # missing
    pq.write_table(pa.table(events), folder / "events.parquet")
    items = np.arange(ITEMS - 5)  # the others have no row
    albums = [f"a{n % 9}" if n % 4 else None for n in items]
    about = pa.table({"item_id": items, "artist": items % 7 + 3, "album": albums})
    pq.write_table(about, folder / "items.parquet")
    return folder


def open_run(files, features, task="ranking", part="train", **more):
    given = {
        "data": str(files / "events.parquet"), "items": str(files / "items.parquet"),
        "cache": str(files / "cache"), "features": features, "task": task, "max_length": 20,
        "candidates": 3, "global_batch": 16, "epochs": 1,
    }  # fmt: skip
    given |= {"labels": "click"} if task == "ranking" else {}
    config = RunConfig.from_settings(given | more)
    path = prepare_data(config)
    store = load_features(config, path)
    return store, Histories(path, 16, features=store, **build_specs(config, part, store))


def read_events(files):
    """user -> its events in order of time."""
    found = {}
    for row in pq.read_table(files / "events.parquet").to_pylist():
        found.setdefault(row["user_id"], []).append(row)
    return found


def hash_parts(rows, *keys):
    return int(derive(0, *(torch.tensor([key]) for key in keys))[0]) % (1 << 64) % rows


def expect(event, sizes):
    """The rows of an event's request, by Python alone."""
    item, user = event["item_id"], event["user_id"]
    known = item < ITEMS - 5
    artist = item % 7 + 3 if known else MISSING
    album = hash_name(f"a{item % 9}") if known and item % 4 else MISSING
    hour = event["timestamp"] // 3600 % 24
    organic = hash_name(event["organic"]) if event["organic"] else MISSING
    parts = [
        *((user, artist), (user, album), (user, hour), (item, hour), (artist, hour)),
        *((user, organic), (user, artist, hour)),
    ]
    local = [user + 1, *(hash_parts(rows, *keys) for rows, keys in zip(sizes[1:], parts))]
    return [1 + first + row for first, row in zip(np.cumsum([0, *sizes]).tolist(), local)]


def test_codes_are_those_of_the_candidate_in_the_order_of_the_list(files):
    store, data = open_run(files, f"artist=id,album,{PLACES}")
    sizes = [fitted.rows for fitted in store.context]
    assert sizes[0] == 1002 and store.context_rows == 1 + sum(sizes) == 278_001_003
    events, seen = read_events(files), 0
    for batch in data:
        codes = batch.sequences["context_features"]
        assert codes.values.dtype == torch.int64 and codes.values.shape[1] == 8
        ids = batch.candidates["candidates"].values.tolist()
        times = batch.sequences["candidate_timestamps"].values.tolist()
        for row, item, time in zip(codes.values.tolist(), ids, times, strict=True):
            user = row[0] - 2
            alike = [e for e in events[user] if (e["item_id"], e["timestamp"]) == (item, time)]
            assert row in [expect(event, sizes) for event in alike]
            seen += 1
    assert seen == 3 * USERS


def test_the_outcome_changes_no_code(files, tmp_path):
    """Neither the action and the label of the candidate nor any other event are in its codes."""
    table = pq.read_table(files / "events.parquet")
    for name, top in (("action", 5), ("click", 2)):
        place = table.schema.get_field_index(name)
        flipped = pa.array(top - 1 - table.column(name).to_numpy())
        table = table.set_column(place, name, flipped)
    pq.write_table(table, tmp_path / "events.parquet")
    pq.write_table(pq.read_table(files / "items.parquet"), tmp_path / "items.parquet")
    (_, data), (_, other) = (open_run(folder, PLACES) for folder in (files, tmp_path))
    for one, two in zip(data, other, strict=True):
        assert not torch.equal(one.sequences["labels"].values, two.sequences["labels"].values)
        codes, again = (each.sequences["context_features"].values for each in (one, two))
        assert torch.equal(codes, again)


def test_other_parts_and_other_data_have_the_same_hashes(files, tmp_path):
    store, _ = open_run(files, PLACES)
    store.copy_statistics(tmp_path)
    config = {"split": "time", "split_time": 5 * 86_400}
    again, data = open_run(files, PLACES, part="test", **config)
    sizes, events = [fitted.rows for fitted in again.context], read_events(files)
    batch = next(iter(data))
    first = batch.sequences["context_features"].values[0].tolist()
    assert first in [expect(event, sizes) for event in events[first[0] - 2]]


def test_hours_follow_the_unit_of_the_timestamps(files, tmp_path):
    table = pq.read_table(files / "events.parquet")
    place = table.schema.get_field_index("timestamp")
    since = 1_700_006_400 // 86_400 * 86_400
    moments = (table.column("timestamp").to_numpy() + since) * 1000
    table = table.set_column(place, "timestamp", pa.array(moments))
    pq.write_table(table, tmp_path / "events.parquet")
    pq.write_table(pq.read_table(files / "items.parquet"), tmp_path / "items.parquet")
    stores = [open_run(folder, "user*hour=cross:999983") for folder in (files, tmp_path)]
    assert [store.hour for store, _ in stores] == [3600, 3_600_000]
    one, two = (next(iter(data)).sequences["context_features"].values for _, data in stores)
    assert torch.equal(one, two)


def test_ids_are_rows():
    feature = Feature("x", "item", "id", ("x",), rows=0)
    fitted = fit_feature(feature, {"x": pa.array([7, None, 2])}, np.ones(3, np.int64))
    assert fitted.rows == 9  # 0 to 7, and the row of all others
    rows = fitted.encode({"x": pa.array([0, 7, 8, -1, None])})
    assert rows[:, 0].tolist() == [1, 8, 0, 0, 0]
    few = fit_feature(Feature("x", "item", "id", ("x",), rows=3), {}, np.ones(0, np.int64))
    assert few.rows == 4 and few.encode({"x": pa.array([2, 3])})[:, 0].tolist() == [3, 0]


def test_keys_of_whole_numbers_are_these_numbers():
    assert make_keys(pa.array([3, None, -1])).tolist() == [3, MISSING, -1]
    assert make_keys(pa.array(["3", "", None])).tolist() == [hash_name("3"), MISSING, MISSING]


def test_how_features_are_written():
    (feature,) = parse_features("user*artist=cross:70")
    assert (feature.columns, feature.rows) == (("user", "artist"), 70)
    assert parse_features("artist=id")[0].rows == 0 and parse_features("user=id:9")[0].rows == 9
    joined = Feature("user*artist", "context", "cross", ("request:user", "item:artist"), rows=70)
    text = write_schema([joined, parse_features("item.artist=id")[0]], {})
    assert 'columns = ["user", "artist"]' in text and "rows = 0" not in text


@pytest.mark.parametrize(
    "features, task, message",
    [
        ("context.action", "ranking", "describes a request by 'action', which is known only after"),
        ("user*action=cross:9", "ranking", "by 'action', which is known only after it"),
        ("user*click=cross:9", "ranking", "by 'click', which a label is made of"),
        ("user*artist=cross:9", "retrieval", "retrieval has no candidates"),
        ("user=id", "ranking", "write how many ids, as user=id:1000"),
        ("user*nobody=cross:9", "ranking", "'user' or 'nobody' is missing"),
        ("event.user*artist=cross:9", "ranking", "'user' or 'artist' is missing"),
    ],
)
def test_what_is_refused(files, features, task, message):
    with pytest.raises(ValueError, match=message):
        open_run(files, features, task)


def test_a_table_of_278_million_rows_is_placed_and_cut_without_being_made():
    spec = TableSpec("context_features", 278_001_003, 512, torch.float32, ("context_features",))
    state = count_state_bytes(RowWiseAdagrad(), spec)
    assert choose_placement(spec, state, 8192.0).kind == "sharded" and state == 4
    layout = ShardLayout((spec,), 8)
    ids = torch.cat(
        [torch.arange(5), torch.randint(spec.rows, (4096,)), spec.rows - 1 - torch.arange(5)]
    )
    keys = layout.compute_keys(0, ids)
    local = layout.find_local(keys)
    owner = keys // layout.size
    assert layout.local_dtype == torch.int32 and layout.size == -(-spec.rows // 8)
    assert torch.equal(find_ids(owner * layout.block(0) + local, spec.rows), ids)
    assert torch.bincount(owner, minlength=8).min() > 300  # of about 512 each
