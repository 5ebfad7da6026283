"""The event store and the samples of its windows, against loops over lists."""

from __future__ import annotations

import json
import pickle
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.time_order import (
    COLUMNS,
    build,
    cut,
    list_history,
    list_samples,
    make_users,
    open_windows,
    read_all,
    write_users,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freescale.data import NegativeSpec
from freescale.data.store import build as store_build
from freescale.data.store import window_index
from freescale.data.store.build import append_to_store, open_store, plan_merge
from freescale.data.store.event_store import EventStore
from freescale.data.store.window_index import SampleRule, WindowIndex

CASES = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def folder(tmp_path_factory):
    """Another one for each example of hypothesis."""
    return lambda: tmp_path_factory.mktemp("store")


def build_by_appends(folder, users, edges):
    """A store whose segments are the events between times; the file has all of them."""
    file = write_users(folder / "users.parquet", users)
    bounds = [-1000, *sorted(edges), 1000]
    parts = [cut(users, low, high) for low, high in zip(bounds, bounds[1:])]
    for number, part in enumerate(filter(None, parts)):
        path = folder / f"part-{number}.parquet"
        if number == 0:
            store_build.build_store(write_users(path, part), folder / "store")
        else:
            append_to_store(folder / "store", write_users(path, part))
    return file


def read_store(store, users, ranges):
    located = store.locate(np.array(users, np.int64))
    begin, end = (np.array(part, np.int64) for part in zip(*ranges))
    events = store.select(located, begin, end)
    return {name: events.read(name).tolist() for name in COLUMNS}


@CASES
@given(
    seed=st.integers(0, 2**32),
    edges=st.lists(st.integers(1, 39), max_size=12),
    most=st.integers(1, 3),
)
def test_any_events_of_any_users_are_read(folder, seed, edges, most):
    """From any segments, some of which appends have merged."""
    random = np.random.default_rng(seed)
    users = make_users(random, 6, 12)
    users = {user: events for user, events in users.items() if events["item_id"]}
    if not users:
        return
    path = folder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_build, "_MOST_SEGMENTS", most)
        patch.setattr(store_build, "_MERGED", 5)
        build_by_appends(path, users, edges)
    store = EventStore(path / "store")
    assert len(store.segments) <= max(1, most)
    assert store.num_events == sum(len(events["item_id"]) for events in users.values())
    wanted = random.choice(sorted(users), 5).tolist()
    ranges = [sorted(random.integers(0, len(users[u]["item_id"]) + 1, 2).tolist()) for u in wanted]
    found = read_store(store, wanted, ranges)
    for name in COLUMNS:
        expected = [users[u][name][low:high] for u, (low, high) in zip(wanted, ranges)]
        assert found[name] == sum(expected, [])
    lengths = store.locate(np.array([*wanted, 10**9])).lengths.tolist()
    assert lengths == [*(len(users[u]["item_id"]) for u in wanted), 0]
    time = int(random.integers(0, 41))
    counts = store.count_before(store.locate(np.array(wanted)), time).tolist()
    assert counts == [sum(t < time for t in users[u]["timestamp"]) for u in wanted]
    late = {u for u, events in users.items() if events["timestamp"][-1] >= 20}
    assert set(store.list_users(20).tolist()) == late


def test_columns_are_as_small_as_their_values(tmp_path):
    build(tmp_path, make_users(np.random.default_rng(0), 9, 20))
    (segment,) = EventStore(tmp_path / "store").segments
    kinds = {name: segment.column(name).dtype for name in COLUMNS}
    assert kinds == dict(zip(COLUMNS, map(np.dtype, ("int8", "int64", "int8", "int8"))))
    assert not segment.column("item_id").flags.writeable


def test_the_store_of_a_file_is_made_once(tmp_path):
    file = write_users(tmp_path / "users.parquet", make_users(np.random.default_rng(0), 9, 20))
    first = open_store(file, tmp_path / "cache")
    before = (first.folder / "store.json").stat().st_mtime_ns
    again = open_store(file, tmp_path / "cache")
    assert again.folder == first.folder
    assert (again.folder / "store.json").stat().st_mtime_ns == before
    other = write_users(tmp_path / "users.parquet", make_users(np.random.default_rng(1), 9, 20))
    assert open_store(other, tmp_path / "cache").folder != first.folder


def test_earlier_events_are_refused_and_the_store_stays(tmp_path):
    users = make_users(np.random.default_rng(0), 9, 20)
    file = build(tmp_path, users)
    store = EventStore(tmp_path / "store")
    last = store.last_time
    early = sum(time < last for events in users.values() for time in events["timestamp"])
    with pytest.raises(
        ValueError,
        match=rf"{early} events are earlier than the last one of the store, {last}: append later",
    ):
        append_to_store(tmp_path / "store", file)
    assert EventStore(tmp_path / "store").fingerprint == store.fingerprint
    assert len(list((tmp_path / "store").glob("segment-*"))) == 1
    assert not list((tmp_path / "store").glob(".append-*"))


def test_other_columns_and_double_users_are_refused(tmp_path):
    users = make_users(np.random.default_rng(0), 9, 20)
    file = build(tmp_path, users)
    table = pq.read_table(file.path)
    pq.write_table(table.drop_columns(["click"]), tmp_path / "less.parquet")
    with pytest.raises(ValueError, match="and the store item_id, timestamp, action, click: append"):
        append_to_store(tmp_path / "store", type(file)(tmp_path / "less.parquet"))
    pq.write_table(pa.concat_tables([table, table]), tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice.parquet: user \d+ has two rows: make one history"):
        open_store(type(file)(tmp_path / "twice.parquet"), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("events-*"))


def test_appends_leave_old_segments_as_they_are(tmp_path):
    users = make_users(np.random.default_rng(0), 12, 20)
    build_by_appends(tmp_path, cut(users, 0, 30), [20])
    files = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "store").glob("segment-*/**/*.npy")
    }
    assert len(files) > 12
    append_to_store(tmp_path / "store", write_users(tmp_path / "late.parquet", cut(users, 30, 99)))
    assert files == {path: path.stat().st_mtime_ns for path in files}


def test_merging_is_amortised():
    """Each event is copied about as often as sizes may double, and segments stay few."""
    sizes, copied, largest = [1000], 0, 0
    for _ in range(1000):
        sizes.append(1)
        first = plan_merge(sizes)
        if first is not None:
            copied += sum(sizes[first:])
            sizes[first:] = [sum(sizes[first:])]
        largest = max(largest, len(sizes))
    assert largest == store_build._MOST_SEGMENTS and copied < 10 * 1000
    assert plan_merge([1] * store_build._MOST_SEGMENTS) is None


# ---- samples


RULES = st.builds(
    SampleRule,
    window=st.sampled_from([1, 7, 10, 100]),
    most=st.integers(1, 4),
    actions=st.sampled_from([(), (1,), (2, 4)]),
    least=st.integers(1, 3),
    by_position=st.booleans(),
)


def load_samples(index, number):
    return [tuple(map(int, sample)) for sample in index.load(number).tolist()]


def expect_samples(users, rule, number):
    expected = []
    for user, anchors in list_samples(
        users, rule.window, number, most=rule.most, actions=rule.actions,
        least=rule.least, by_position=rule.by_position,
    ):  # fmt: skip
        times = users[user]["timestamp"]
        earlier = sum(time < times[anchors[0]] for time in times)
        expected.append((user, anchors[0], anchors[-1] - anchors[0] + 1, earlier))
    return expected


@CASES
@given(seed=st.integers(0, 2**32), rule=RULES, edge=st.integers(1, 39), block=st.integers(1, 40))
def test_samples_of_windows(folder, seed, rule, edge, block):
    """Before and after an append, which may fall into a window."""
    users = make_users(np.random.default_rng(seed), 7, 12)
    old, new = cut(users, 0, edge), cut(users, edge, 99)
    if not old or not new:
        return
    path = folder()
    build(path, old)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_index, "_BLOCK", block)
        store = EventStore(path / "store")
        last = max(max(u["timestamp"]) for u in old.values()) // rule.window + 1
        index = WindowIndex(store, rule)
        index.prepare(0, last)
        for number in range(last):
            assert load_samples(index, number) == expect_samples(old, rule, number)
        whole = {
            path: path.stat().st_mtime_ns
            for path in index.folder.glob("window-*.npy")
            if (int(path.stem.split("-")[1]) + 1) * rule.window <= store.last_time
        }
        store = append_to_store(path / "store", write_users(path / "new.parquet", new))
        index = WindowIndex(store, rule)
        last = store.last_time // rule.window + 1
        index.prepare(0, last)
        for number in range(last):
            assert load_samples(index, number) == expect_samples(users, rule, number)
        assert whole == {path: path.stat().st_mtime_ns for path in whole}


def test_only_missing_windows_are_made(tmp_path, monkeypatch):
    users = make_users(np.random.default_rng(0), 12, 20)
    build(tmp_path, users)
    index = WindowIndex(EventStore(tmp_path / "store"), SampleRule(10, 1))
    made = []
    original = index._make
    monkeypatch.setattr(
        index, "_make", lambda low, high, p: (made.append((low, high)), original(low, high, p))
    )
    index.prepare(2, 4)
    index.prepare(2, 4)
    index.prepare(1, 4)
    assert made == [(2, 4), (1, 2)]
    with pytest.raises(ValueError, match="1,000,000 windows of 10 between"):
        index.prepare(0, 1_000_000)


# ---- batches


def open_case(seed, folder, edges=(), **options):
    users = make_users(np.random.default_rng(seed), 9, 14)
    users = {user: events for user, events in users.items() if events["item_id"]}
    file = build_by_appends(folder, users, edges)
    return users, open_windows(file, folder / "store", range(0, 4), **options)


@CASES
@given(
    seed=st.integers(0, 2**32),
    edges=st.lists(st.integers(1, 39), max_size=3),
    candidates=st.integers(1, 4),
    actions=st.sampled_from([(), (1, 4)]),
    pools=st.sampled_from([(), (1, 2, 4), (2,), (4, 1)]),
    least=st.integers(1, 3),
    world=st.integers(1, 3),
)
def test_batches_of_ranking(folder, seed, edges, candidates, actions, pools, least, world):
    options = {
        "candidates": candidates, "anchor_actions": actions, "min_history": least,
        "history_pools": pools,
    }  # fmt: skip
    path = folder()
    users, data = open_case(seed, path, edges, **options)
    file = data.file
    found, numbers = read_all(data), []
    expected = []
    for window in range(4):
        samples = list_samples(users, 10, window, most=candidates, actions=actions, least=least)
        numbers += [window] * bool(samples)
        for user, anchors in samples:
            events = users[user]
            past = list_history(events, anchors[0], 6, pools)
            expected.append(
                {
                    "history": [events["item_id"][n] for n in past],
                    "timestamps": [events["timestamp"][n] for n in past],
                    "actions": [events["action"][n] for n in past],
                    "candidates": [events["item_id"][n] for n in anchors],
                    "candidate_timestamps": [events["timestamp"][n] for n in anchors],
                    "labels": [[float(events["click"][n])] for n in anchors],
                }
            )
    assert found == expected and data.windows == numbers
    assert data.num_samples == len(expected) == sum(data.batch_size(n) for n in range(data.stop))
    ranks = [
        pickle.loads(
            pickle.dumps(
                open_windows(file, path / "store", range(0, 4), rank=r, world=world, **options)
            )
        )
        for r in range(world)
    ]
    for number in range(data.stop):
        parts = [one.batch(number) for one in ranks]
        whole = data.batch(number)
        for name, column in whole.sequences.items():
            joined = torch.cat([part.sequences[name].values for part in parts])
            assert torch.equal(joined, column.values), name
        assert torch.equal(torch.cat([part.keys for part in parts]), whole.keys)


@CASES
@given(
    seed=st.integers(0, 2**32),
    edges=st.lists(st.integers(1, 39), max_size=3),
    max_length=st.integers(1, 9),
)
def test_batches_of_retrieval(folder, seed, edges, max_length):
    path = folder()
    users, data = open_case(
        seed, path, edges, task="retrieval", max_length=max_length,
        negatives=NegativeSpec(count=2, per="sample", source="uniform"),
    )  # fmt: skip
    most = max(1, max_length // 2)
    found = [
        (s["history"], s["timestamps"], s["targets"], s["target_weights"]) for s in read_all(data)
    ]
    expected, seen = [], []
    for window in range(4):
        for user, anchors in list_samples(users, 10, window, most=most, by_position=True):
            events, last = users[user], anchors[-1]
            inputs = list(range(max(0, last - max_length), last))
            expected.append(
                (
                    [events["item_id"][n] for n in inputs],
                    [events["timestamp"][n] for n in inputs],
                    [events["item_id"][n + 1] for n in inputs],
                    [float(n + 1 in anchors) for n in inputs],
                )
            )
            assert sum(expected[-1][3]) == len(anchors)
            seen += [(user, n) for n in anchors]
    assert found == expected
    # Each event but the first of a user is a target once.
    every = [(u, n) for u, events in users.items() for n in range(1, len(events["item_id"]))]
    assert sorted(seen) == sorted(every)
    for number in range(data.stop):
        batch = data.batch(number)
        weights = batch.sequences["target_weights"]
        sums = [float(part.sum()) for part in weights.values.split(weights.lengths.tolist())]
        assert batch.weights["next_item"].tolist() == sums


@pytest.mark.parametrize("part", ["validation", "test"])
def test_evaluation_of_retrieval_has_the_first_target_of_each_user(tmp_path, part):
    users, data = open_case(3, tmp_path, task="retrieval", part=part, max_length=4)
    expected = []
    for window in range(4):
        for user, anchors in list_samples(users, 10, window, most=99, by_position=True):
            first, events = anchors[0], users[user]
            expected.append(
                (events["item_id"][max(0, first - 4) : first], events["item_id"][first])
            )
    assert [(s["history"], s["target"]) for s in read_all(data)] == expected


def test_options_that_do_not_fit_are_refused(tmp_path):
    users = make_users(np.random.default_rng(0), 9, 14)
    file = build(tmp_path, users)
    with pytest.raises(ValueError, match=r"history_pools \(1,\) is of ranking"):
        open_windows(file, tmp_path / "store", range(4), task="retrieval", history_pools=(1,))
    plain = tmp_path / "plain.parquet"
    pq.write_table(pq.read_table(file.path).drop_columns(["action"]), plain)
    shutil.rmtree(tmp_path / "store")
    store_build.build_store(type(file)(plain), tmp_path / "store")
    with pytest.raises(ValueError, match="plain.parquet: anchor_actions .* has no column 'action'"):
        open_windows(type(file)(plain), tmp_path / "store", range(4), anchor_actions=(1,))


# ---- nothing of the future


OTHER = {
    "item_id": lambda item: (item + 1) % 50,
    "action": {1: 2, 2: 4, 4: 1}.get,
    "click": lambda click: 1 - click,
}


def change_from(users, time):
    """Other items, actions and labels at a time and after it."""
    found = {}
    for user, events in users.items():
        late = [other >= time for other in events["timestamp"]]
        found[user] = {"timestamp": events["timestamp"]} | {
            name: [change(v) if new else v for v, new in zip(events[name], late, strict=True)]
            for name, change in OTHER.items()
        }
    return found


@pytest.mark.parametrize("pools", [(), (1, 2, 4)])
@pytest.mark.parametrize("candidates", [1, 3])
def test_no_event_at_or_after_an_anchor_changes_its_sample(tmp_path, candidates, pools):
    """To the bit, whatever happens at its time and later. Half of the anchors share their time with
    another event of the user."""
    users = make_users(np.random.default_rng(5), 9, 14, times=16)
    options = {"candidates": candidates, "history_pools": pools}

    def read(folder, users):
        return read_all(open_windows(build(folder, users), folder / "store", range(2), **options))

    before = read(tmp_path / "all", users)
    times = [time for events in users.values() for time in events["timestamp"]]
    assert len(times) - sum(len(set(e["timestamp"])) for e in users.values()) > 20
    compared = 0
    for time in range(16):
        after = read(tmp_path / str(time), change_from(users, time))
        for ours, theirs in zip(before, after, strict=True):
            anchors = ours["candidate_timestamps"]
            assert anchors == theirs["candidate_timestamps"]
            if anchors[0] <= time:
                compared += len(ours["history"]) > 0
                for name in ("history", "timestamps", "actions"):
                    assert ours[name] == theirs[name]
            if anchors[-1] < time:
                assert ours == theirs
            if anchors[0] >= time:  # the change is seen: these are the anchors themselves
                assert ours["candidates"] != theirs["candidates"]
    assert compared > 100


def test_a_window_does_not_know_the_next(tmp_path):
    """Without the later events, the windows before are the same, to the bit."""
    users = make_users(np.random.default_rng(5), 9, 14)
    for task in ("ranking", "retrieval"):
        negatives = NegativeSpec(count=2, per="sample", source="popularity")
        options = {"task": task, "negatives": negatives, "cut": 10}
        whole = open_windows(
            build(tmp_path / f"{task}-all", users), tmp_path / f"{task}-all" / "store",
            range(1, 3), **options,
        )  # fmt: skip
        early = cut(users, 0, 30)
        early = {u: early.get(u, {name: [] for name in COLUMNS}) for u in users}
        file = build(tmp_path / f"{task}-early", early)
        file.num_items = whole.num_items
        part = open_windows(
            file, tmp_path / f"{task}-early" / "store", range(1, 3),
            read={"num_items": whole.num_items}, **options,
        )  # fmt: skip
        assert read_all(whole) == read_all(part) and whole.stop > 2


def test_the_meta_file_is_written_last(tmp_path, monkeypatch):
    """An append that is killed leaves the store as it was, and the next one cleans up."""
    users = make_users(np.random.default_rng(0), 12, 20)
    build(tmp_path, cut(users, 0, 20))
    late = write_users(tmp_path / "late.parquet", cut(users, 20, 99))

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_build, "write_about", die)
        with pytest.raises(KeyboardInterrupt):
            append_to_store(tmp_path / "store", late)
    about = json.loads((tmp_path / "store" / "store.json").read_text())
    assert [entry["name"] for entry in about["segments"]] == ["segment-0000"]
    store = append_to_store(tmp_path / "store", late)
    assert [entry["name"] for entry in store.entries] == ["segment-0000", "segment-0001"]
    assert store.num_events == sum(len(events["item_id"]) for events in users.values())
