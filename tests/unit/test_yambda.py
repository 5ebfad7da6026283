"""Yambda's published layout: what its events become, and which artist and album an item has."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.config import DataConfig
from freescale.data.features.sources import open_sources
from freescale.data.histories import HistoriesFile
from freescale.data.ingest import tables
from freescale.data.ingest.interactions import read_interactions
from freescale.data.ingest.prepare import prepare

EVENTS = [  # uid, timestamp, item_id, is_organic, played_ratio_pct, event_type, action
    (7, 0, 3, 1, 50, "listen", 1),
    (7, 5, 4, 0, 49, "listen", 4),
    (7, 5, 3, 1, None, "like", 2),
    (9, 10, 5, 0, 159, "listen", 1),
    (9, 15, 5, 1, None, "dislike", 0),
    (9, 3600, 4, 1, None, "unlike", 0),
    (9, 3605, 4, 0, None, "undislike", 0),
    (9, 3610, 9, 0, None, "listen", 4),  # without a percentage
]
ENUM = pa.dictionary(pa.int32(), pa.string())
NAMES = ("uid", "timestamp", "item_id", "is_organic", "played_ratio_pct", "event_type")


@pytest.fixture
def folder(tmp_path):
    write_events(tmp_path / "y", EVENTS)
    mapping = {"artist_id": [1, 1, 2, 6], "item_id": [3, 4, 3, 20]}  # item 3 has two artists
    pq.write_table(pa.table(mapping), tmp_path / "y" / "artist_item_mapping.parquet")
    mapping = {"album_id": [8, 9], "item_id": [5, 4]}
    pq.write_table(pa.table(mapping), tmp_path / "y" / "album_item_mapping.parquet")
    return tmp_path / "y"


def write_events(folder, events, kinds=ENUM):
    folder.mkdir(exist_ok=True)
    columns = dict(zip(NAMES, zip(*[event[:6] for event in events])))
    types = [pa.uint32(), pa.uint32(), pa.uint32(), pa.uint8(), pa.uint16(), kinds]
    arrays = [pa.array(columns[name], kind) for name, kind in zip(NAMES, types)]
    table = pa.table(arrays, NAMES).append_column(
        "track_length_seconds", pa.array([200] * len(events), pa.uint32())
    )
    pq.write_table(table, folder / "multi_event.parquet")


def read(path, format="auto"):
    return [row for batch in read_interactions(path, format) for row in batch.to_pylist()]


def expect(events):
    names = ("user_id", "timestamp", "item_id", "is_organic", "action", "listen_plus")
    return [
        dict(zip(names, (user, time, item, organic, action, int(action == 1))))
        for user, time, item, organic, _, _, action in events
    ]


def test_a_folder_is_read_as_events_with_actions(folder, monkeypatch):
    monkeypatch.setattr(tables, "_ROWS", 3)
    reader = read_interactions(folder)
    batches = list(reader)
    assert reader.formats == ["yambda"] and [b.num_rows for b in batches] == [3, 3, 2]
    assert [row for b in batches for row in b.to_pylist()] == expect(EVENTS)
    assert read(folder / "multi_event.parquet", "yambda") == expect(EVENTS)
    write_events(folder, EVENTS, pa.string())
    assert read(folder) == expect(EVENTS)


def test_as_plain_parquet_nothing_is_derived(folder):
    rows = read(folder / "multi_event.parquet", "parquet")
    assert "action" not in rows[0] and rows[0]["is_organic"] == 1


def test_histories_say_how_they_were_read_and_labels_need_no_rule(folder, tmp_path):
    path = prepare(folder, tmp_path / "cache", labels="listen_plus")
    file = HistoriesFile(path)
    assert {"action", "listen_plus", "is_organic"} <= set(file.columns) and not file.no_labels.get(
        "listen_plus"
    )
    assert "timestamp -> time (integers, of no known unit)" in file.read_as[0]
    assert "event_type, played_ratio_pct, is_organic -> action" in file.read_as[0]
    group = file.read(0, ("action", "listen_plus"))
    assert group.values["action"].tolist() == [1, 4, 2, 1, 0, 0, 0, 4]
    assert group.values["listen_plus"].tolist() == [1, 0, 0, 1, 0, 0, 0, 0]


def test_the_last_row_of_a_mapping_counts(folder, tmp_path):
    found = open_sources(DataConfig(data=str(folder)), tmp_path / "cache").attributes["item"]
    columns = found.read(["item_id", "artist", "album"])
    rows = dict(
        zip(
            columns["item_id"].to_pylist(),
            zip(*(columns[n].to_pylist() for n in ("artist", "album"))),
        )
    )
    assert rows == {3: (2, None), 4: (1, 9), 5: (None, 8), 20: (6, None)}
    kinds = [found.infer(name, columns[name]).feature for name in ("artist", "album")]
    assert [(each.kind, each.rows) for each in kinds] == [("id", 0), ("id", 0)]  # no amounts
    own = tmp_path / "own.csv"
    own.write_text("item_id,mood\n3,1\n")
    given = open_sources(DataConfig(data=str(folder), items=str(own)), tmp_path / "cache")
    assert given.attributes["item"].names == ["mood"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({5: "skip"}, "row 2: column 'event_type' holds 'skip', which is none of listen, like"),
        ({3: 2}, "column 'is_organic' holds 2.*, not 0 or 1"),
    ],
)
def test_what_is_no_event_is_refused(folder, change, message):
    wrong = list(EVENTS[1])
    for place, value in change.items():
        wrong[place] = value
    write_events(folder, [EVENTS[0], tuple(wrong), *EVENTS[2:]])
    with pytest.raises(ValueError, match=message):
        read(folder)


def test_other_files_are_not_taken_for_it(folder, tmp_path):
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"uid": [1], "item_id": [2], "timestamp": [3]}), path)
    with pytest.raises(
        ValueError, match="column 'event_type', 'played_ratio_pct', 'is_organic' is m"
    ):
        read(path, "yambda")
    (folder / "album_item_mapping.parquet").unlink()
    with pytest.raises(ValueError, match="artist_item_mapping.parquet"):
        read(folder)
