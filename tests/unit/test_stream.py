"""Streams: which window an event belongs to, what is kept of a source, and what a killed reader
leaves."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.checkpoints import killed_at
from helpers.streams import (
    FEATURES,
    HOUR,
    START,
    add_features,
    configure,
    describe_windows,
    make_events,
    move,
    open_one,
    read_on,
    read_store,
    read_windows,
    split,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.data import hash_ids
from freescale.data.stream.parsing import Events
from freescale.data.stream.source import Chunk
from freescale.data.stream.windows import WindowRule
from freescale.train.metrics_log import has_window

# ---- windows


def expect(times, length, lateness, drops):
    """Window, time and whether it is kept, of the events of a partition, one by one."""
    top, found = None, []
    for time in times:
        first = None if top is None else (top - lateness) // length
        own = time // length
        late = first is not None and own < first
        window = first if late else own
        found.append((window, window * length if late else time, not (late and drops)))
        top = time if top is None else max(top, time)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 80), max_size=25), min_size=1, max_size=3),
    st.integers(1, 12),
    st.integers(0, 15),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_windows_do_not_depend_on_how_partitions_interleave(logs, length, lateness, drops, random):
    rule = WindowRule(length, lateness, drops)
    found = {number: [] for number in range(len(logs))}
    rest = {number: list(times) for number, times in enumerate(logs)}
    while any(rest.values()):
        number = random.choice([number for number, times in rest.items() if times])
        count = random.randint(1, len(rest[number]))
        times, rest[number] = rest[number][:count], rest[number][count:]
        events = Events({"timestamp": np.array(times)}, {})
        name, offsets = str(number), np.arange(count)
        windows, moved, kept = rule.assign(Chunk(name, name, offsets, events, False, 0.0))
        found[number] += zip(windows.tolist(), moved.tolist(), kept.tolist(), strict=True)
        # A window that all partitions have passed gets no more events.
        over = min(rule.find_open(str(number)) for number in range(len(logs)))
        assert windows.min() > rule.closed
        rule.closed = max(rule.closed, over - 1)
    for number, times in enumerate(logs):
        assert found[number] == expect(times, length, lateness, drops)


def test_no_event_of_a_file_is_late_because_of_another_one_in_it():
    rule = WindowRule(10)
    events = Events({"timestamp": np.array([25, 3, 31])}, {})
    windows, _, _ = rule.assign(Chunk("", "a", np.arange(3), events, True, 0.0))
    assert windows.tolist() == [2, 0, 3] and rule.find_open("") == 3


# ---- a folder


def feed(source, table, files=8):
    for name, part in split(table, files):
        move(source, name, part)


def test_a_folder_becomes_windows(tmp_path):
    events = make_events()
    feed(tmp_path / "in", events)
    stream = open_one(tmp_path / "s", tmp_path / "in", event_id="event")
    read_on(stream)
    windows, times = read_windows(tmp_path / "s"), events.column("timestamp").to_numpy()
    assert [window["number"] for window in windows] == list(range(11))  # the last one is not over
    for number, window in enumerate(windows):
        begin = START + number * HOUR
        inside = events.filter((times >= begin) & (times < begin + HOUR))
        assert (window["from"], window["events"]) == (begin, inside.num_rows)
        assert window["users"] == len(set(inside.column("user_id").to_pylist()))
        assert sum(count for _, _, count in window["partitions"].values()) == inside.num_rows
    assert sum(window["new_users"] for window in windows) == 20
    over = events.filter(times < START + 11 * HOUR)
    expected = zip(
        hash_ids(over.column("user_id").to_pylist()).tolist(),
        hash_ids(over.column("item_id").to_pylist()).tolist(),
        over.column("timestamp").to_pylist(),
        over.column("action").to_pylist(),
        strict=True,
    )
    # users one after another, the events of each in order of time and file
    assert read_store(tmp_path / "s", "action") == sorted(expected, key=lambda event: event[0])
    texts = pq.read_table(tmp_path / "s" / "first" / "vocabulary.parquet").to_pydict()
    assert texts["id"] == hash_ids(texts["text"]).tolist()
    assert set(texts["text"]) == set(over.column("item_id").to_pylist())
    assert [window["texts"][0] for window in windows] == np.cumsum(
        [0, *(window["texts"][1] for window in windows[:-1])]
    ).tolist()


def test_values_of_features_come_at_any_time(tmp_path):
    """Categories have the number in which they came; a window counts what is new."""
    events = add_features(make_events())
    feed(tmp_path / "in", events)
    settings = {"features": FEATURES, "new_values": 6}
    stream = open_one(tmp_path / "s", tmp_path / "in", **settings)
    read_on(stream, 5)
    del stream  # killed
    stream = open_one(tmp_path / "s", tmp_path / "in", **settings)
    read_on(stream)
    texts = pq.read_table(tmp_path / "s" / "first" / "vocabulary.parquet").to_pylist()
    texts = {row["id"]: row["text"] for row in texts if row["column"] == "category.channel"}
    over = events.slice(0, sum(w["events"] for w in read_windows(tmp_path / "s"))).to_pylist()
    expected = sorted(over, key=lambda row: hash_ids([row["user_id"]]).item())
    found = read_store(tmp_path / "s", "category.channel", "number.price")
    assert [texts.get(row[3]) for row in found] == [row["channel"] for row in expected]
    prices = [None if np.isnan(row[4]) else row[4] for row in found]
    assert prices == [row["price"] for row in expected]
    channels = [row["channel"] for row in over if row["channel"] is not None]
    assert list(texts.values()) == list(dict.fromkeys(channels))
    known, first, end = [], 0, None
    for window in read_windows(tmp_path / "s"):
        own = over[first : (first := first + window["events"])]
        values = [row["channel"] for row in own if row["channel"] is not None]
        new = [each for each in dict.fromkeys(values) if each not in known]
        known += new
        end = end or len(known) + 6
        given = [row["price"] for row in own if row["price"] is not None]
        expected = {
            "channel/new": len(new),
            "channel/unknown": sum(each in known[end:] for each in values) / len(own),
            "channel/missing": 1 - len(values) / len(own),
            "price/missing": 1 - len(given) / len(own),
            "price/mean": np.mean(given),
        }
        assert window["values"] == pytest.approx(expected)
    assert window["values"]["channel/unknown"]
    with pytest.raises(ValueError, match="'action' is known only after a request"):
        read_on(open_one(tmp_path / "t", tmp_path / "in", features="context.action=categorical"))
    with pytest.raises(ValueError, match="'channel' with --follow: say its kind"):
        open_one(tmp_path / "t", tmp_path / "in", features="channel")
    with pytest.raises(ValueError, match="new_values 6, and now it is 7"):
        open_one(tmp_path / "s", tmp_path / "in", features=FEATURES, new_values=7)


def test_formats_and_times_of_several_kinds(tmp_path):
    """Files of one stream may be of any format; a date is a moment in microseconds."""
    source = tmp_path / "in"
    source.mkdir()
    lines = [{"user": "u", "sku": "a", "time": f"2024-05-0{day}T00:00:00"} for day in (1, 2)]
    (source / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (source / "2.csv").write_text("user,sku,time\nu,b,2024-05-03 00:00:00.25\nv,7,2024-05-04\n")
    stream = open_one(tmp_path / "s", source, window="1d")
    read_on(stream)
    windows = read_windows(tmp_path / "s")
    day = 86_400 * 10**6
    assert [(w["to"] - w["from"], w["events"]) for w in windows] == [(day, 1)] * 3
    items = [item for _, item, _ in read_store(tmp_path / "s")]
    assert items == hash_ids(["a", "a", "b"]).tolist()


@pytest.mark.parametrize("late", ["next", "drop"])
def test_late_events(tmp_path, late):
    source = tmp_path / "in"
    table = make_events(80, 4)
    feed(source, table, 1)
    behind = table.slice(0, 10)  # of the first window
    move(source, "z.parquet", behind)
    later = pa.table({**make_events(1).to_pydict(), "timestamp": [START + 9 * HOUR]})
    move(source, "zz.parquet", later)
    stream = open_one(tmp_path / "s", source, late=late)
    read_on(stream)
    windows = read_windows(tmp_path / "s")
    assert [window["late"] for window in windows] == [0, 0, 0, 10 * (late == "next")]
    assert [window["dropped"] for window in windows] == [0, 0, 0, 10 * (late == "drop")]
    assert sum(window["events"] for window in windows) == 80 + 10 * (late == "next")
    begin = START + 3 * HOUR
    moved = [event for event in read_store(tmp_path / "s") if event[2] == begin]
    before = sum(time == begin for time in table.column("timestamp").to_pylist())
    assert len(moved) == before + 10 * (late == "next")


def test_an_allowed_lateness_waits(tmp_path):
    source = tmp_path / "in"
    table = make_events(80, 4)
    move(source, "b.parquet", table.slice(40))
    stream = open_one(tmp_path / "s", source, lateness="4h")
    read_on(stream)
    move(source, "a.parquet", table.slice(0, 40))  # after the file that comes next by its name
    later = pa.table({**make_events(1).to_pydict(), "timestamp": [START + 9 * HOUR]})
    move(source, "c.parquet", later)
    read_on(stream)
    found = read_windows(tmp_path / "s")
    feed(tmp_path / "in-order", table, 4)
    move(tmp_path / "in-order", "q.parquet", later)
    read_on(open_one(tmp_path / "t", tmp_path / "in-order"))
    assert sum(window["late"] for window in found) == 0
    assert read_store(tmp_path / "s") == read_store(tmp_path / "t")


def test_events_that_come_twice(tmp_path):
    """In the same window, in one that is over, and in a file that is moved again."""
    table = make_events()
    feed(tmp_path / "once", table, 6)
    read_on(open_one(tmp_path / "s", tmp_path / "once", event_id="event"))
    source = tmp_path / "twice"
    for number, (name, part) in enumerate(split(table, 6)):
        again = pa.concat_tables([part, part.slice(5, 20)])
        if number > 2:
            again = pa.concat_tables([table.slice(100, 30), again])
        move(source, name, again)
    stream = open_one(tmp_path / "t", source, event_id="event")
    read_on(stream, 4)
    del stream  # killed
    stream = open_one(tmp_path / "t", source, event_id="event")
    read_on(stream)
    assert read_store(tmp_path / "t") == read_store(tmp_path / "s")
    found = read_windows(tmp_path / "t")
    assert sum(window["duplicates"] for window in found) > 100
    before = read_store(tmp_path / "t")
    path = next(iter(sorted(source.iterdir())))
    shutil.copy(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)
    read_on(stream)
    assert read_store(tmp_path / "t") == before and len(read_windows(tmp_path / "t")) == len(found)


def test_a_file_that_is_written_again_stops_the_stream(tmp_path):
    table = make_events()
    feed(tmp_path / "in", table)
    stream = open_one(tmp_path / "s", tmp_path / "in")
    read_on(stream)
    os.utime(tmp_path / "in" / "part-001.parquet")  # touched
    read_on(stream)
    other = tmp_path / "other"  # as large
    other.write_bytes((tmp_path / "in" / "part-001.parquet").read_bytes()[::-1])
    other.replace(tmp_path / "in" / "part-001.parquet")
    with pytest.raises(ValueError, match="part-001.parquet was written again"):
        read_on(stream)
    with pytest.raises(ValueError, match="part-001.parquet was written again"):
        read_on(open_one(tmp_path / "s", tmp_path / "in"))


def test_a_source_that_is_gone_for_a_while(tmp_path):
    table = make_events()
    feed(tmp_path / "in", table)
    stream = open_one(tmp_path / "s", tmp_path / "in")
    read_on(stream, 3)
    (tmp_path / "in").rename(tmp_path / "away")
    read_on(stream)
    before = len(read_windows(tmp_path / "s"))
    (tmp_path / "away").rename(tmp_path / "in")
    (tmp_path / "in" / "part-000.parquet").unlink()  # it was read: nobody needs it
    read_on(stream)
    assert before < len(read_windows(tmp_path / "s")) == 11


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"timestamp": [1_700_000_000_000]}, "finer than s, which earlier events have"),
        ({"action": None}, "columns .* differ from those of earlier events"),
        ({"user_id": [None]}, "2.parquet.*missing"),
    ],
)
def test_files_that_do_not_fit(tmp_path, second, message):
    table = make_events(1).to_pydict()
    move(tmp_path / "in", "1.parquet", pa.table(table))
    other = {name: values for name, values in (table | second).items() if values is not None}
    move(tmp_path / "in", "2.parquet", pa.table(other))
    with pytest.raises(ValueError, match=message):
        read_on(open_one(tmp_path / "s", tmp_path / "in"))


def test_a_killed_reader_changes_nothing(tmp_path):
    """Killed before each operation on files in turn: the next one finds the windows as they would
    have been."""
    feed(tmp_path / "in", add_features(make_events(60, 3)), 2)
    options = {"event_id": "event", "late": "next", "features": FEATURES}
    read_on(open_one(tmp_path / "calm", tmp_path / "in", **options))
    expected = describe_windows(read_windows(tmp_path / "calm"))
    events = read_store(tmp_path / "calm", "event_id", "category.channel")
    number, reached = 0, True
    while reached:
        folder = tmp_path / "s"
        shutil.rmtree(folder, ignore_errors=True)

        def follow(folder=folder):
            read_on(open_one(folder, tmp_path / "in", **options))

        reached = killed_at(number, follow)
        follow()
        assert describe_windows(read_windows(folder)) == expected
        assert read_store(folder, "event_id", "category.channel") == events
        number += 1 + number // 8
    assert number > 25
    names = {path.name for path in folder.iterdir()}
    assert names - {"cache"} == {
        "first",
        "store",
        "windows.jsonl",
        f"waiting-{len(expected)}.arrow",
    }


def test_settings_stay_as_they_are(tmp_path):
    feed(tmp_path / "in", make_events())
    read_on(open_one(tmp_path / "s", tmp_path / "in"))
    with pytest.raises(ValueError, match="window '1h', and now it is '2h'"):
        open_one(tmp_path / "s", tmp_path / "in", window="2h")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rows": ""}, "--follow needs a dynamic table"),
        ({"decay": "cosine"}, "--decay cosine with --follow"),
        ({"data": "other"}, "--data other with --follow"),
        ({"split": "none"}, "--split none with --order time"),
        ({"lateness": "soon"}, "--lateness must be a length of time"),
        ({"features": "auto"}, "--features auto with --follow"),
        ({"follow": None, "data": "x", "late": "drop"}, "--late drop is of --follow"),
    ],
)
def test_settings_that_are_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        configure(tmp_path, tmp_path, **{"stop_when_idle": None, **given})


def test_the_line_of_a_window_is_found_behind_many_restarts(tmp_path):
    lines = [{"step": 4, "stream": {"number": 7}}, {"step": 4, "window": {"number": 8}}]
    lines += [{"step": 4, "restart": {"why": "killed", "number": 1}}] * 200
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 5, "stream": {"number": 9')
    assert has_window(tmp_path, "stream", 7) and has_window(tmp_path, "window", 8)
    assert not has_window(tmp_path, "window", 7) and not has_window(tmp_path, "stream", 9)
    assert not has_window(tmp_path / "none", "stream", 7)
