"""`Histories` against a plain Python oracle: order, splits, slices, negatives, resume, and the
prefetching thread."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.loading import load_histories
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.batch import Jagged, SequenceBatch
from freescale.data import SplitSpec, prefetch
from freescale.data.batches.negatives import choose_negatives_per, draw_negatives
from freescale.data.batches.splits import LEAST_EVENTS, find_ends, find_later, find_window
from freescale.data.histories import RowGroup
from freescale.random import derive, hash_name, integers

USERS, GROUP = 53, 6  # 9 row groups, the last one short


def make(path: Path, users: int = USERS, seed: int = 0, group: int = GROUP) -> list[dict]:
    """A histories file with lengths from 0 up and equal timestamps; returns its rows."""
    draw = random.Random(seed)
    rows = []
    for user in range(users):
        length = draw.choice([0, 1, 2, 3, 4, 5, 9, 17, 40])
        rows.append(
            {
                "user_id": 1000 + user,
                "item_id": [draw.randrange(300) for _ in range(length)],
                "timestamp": sorted(draw.randrange(60) for _ in range(length)),
                "action": [draw.randrange(4) for _ in range(length)],
                "like": [draw.randrange(2) for _ in range(length)],
                "score": [float(draw.random() < 0.5) for _ in range(length)],
            }
        )
    lists = {n: pa.list_(pa.int64()) for n in ("item_id", "timestamp", "action", "like")}
    schema = pa.schema({"user_id": pa.int64(), **lists, "score": pa.list_(pa.float64())})
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=group)
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "histories.parquet"
    return path, make(path)


def samples_of(batch: SequenceBatch, seed: int = 0) -> list[int]:
    """Which sample each row is, by its key."""
    keys = {
        key: s for s, key in enumerate(derive(seed, batch.number, torch.arange(USERS)).tolist())
    }
    return [keys[key] for key in batch.keys.tolist()]


def as_ints(feature) -> list[list[int]]:
    return [part.tolist() for part in feature.values.split(feature.lengths.tolist())]


def same(a: SequenceBatch, b: SequenceBatch) -> bool:
    if a.number != b.number or a.parts().keys() != b.parts().keys():
        return False
    return all(
        torch.equal(ours, theirs) for ours, theirs in zip(a.tensors(), b.tensors(), strict=True)
    )


def part_of(row: dict, part: str, split: str, split_time: int | None) -> tuple[int, int | None]:
    """Plain oracle of the splits: (events of the history, place of the target or None)."""
    count = len(row["item_id"])
    if split == "none":
        return count, None
    if split == "leave-one-out":
        train = (max(count - 2, 0), None)
        return {
            "train": train,
            "validation": (count - 2, count - 2),
            "test": (count - 1, count - 1),
        }[part]
    cut = sum(t < split_time for t in row["timestamp"])
    if part == "train":
        return max(cut - 1, 0), None
    if part == "validation":
        return cut - 1, cut - 1
    return (cut, cut) if cut < count else (0, 0)


SPLITS = [("leave-one-out", None), ("time", 30), ("time", -1), ("time", 1000), ("none", None)]
CASES = [
    (p, s, t)
    for s, t in SPLITS
    for p in ("train", "validation", "test")
    if s != "none" or p == "train"
]


@pytest.mark.parametrize(("part", "split", "split_time"), CASES)
@pytest.mark.parametrize("max_length", [1, 7, 200])
def test_retrieval_samples(data, part, split, split_time, max_length):
    path, rows = data
    loader = load_histories(
        path,
        8,
        max_length=max_length,
        part=part,
        kind=split,
        time=split_time,
        count=4,
        per="sample",
    )
    seen = []
    for batch in loader:
        batch.check()
        names = ["history", "timestamps", "actions"] + (["targets"] if part == "train" else [])
        assert list(batch.sequences) == names and list(batch.dense) == [
            "negatives" if part == "train" else "target"
        ]
        columns = {name: as_ints(batch.sequences[name]) for name in batch.sequences}
        for place, sample in enumerate(samples_of(batch)):
            seen.append(sample)
            row = rows[sample]
            history, target = part_of(row, part, split, split_time)
            if target is None:
                window = {
                    n: row[n][:history][-(max_length + 1) :]
                    for n in ("item_id", "timestamp", "action")
                }
                expected = {n: values[:-1] for n, values in window.items()}
                assert columns["targets"][place] == window["item_id"][1:]
                assert batch.weights["next_item"][place] == max(len(window["item_id"]) - 1, 0)
            else:
                usable = history >= 1
                cut = slice(max(history - max_length, 0), history) if usable else slice(0, 0)
                expected = {n: row[n][cut] for n in ("item_id", "timestamp", "action")}
                assert batch.weights["next_item"][place] == usable
                assert batch.dense["target"][place] == (row["item_id"][target] if usable else 0)
            assert columns["history"][place] == expected["item_id"]
            assert columns["timestamps"][place] == expected["timestamp"]
            assert columns["actions"][place] == expected["action"]
    assert sorted(seen) == list(range(USERS))


@pytest.mark.parametrize("split", sorted(LEAST_EVENTS))
def test_the_shortest_history_that_is_trained_on(split):
    least = LEAST_EVENTS[split]
    offsets = np.array([0, least - 1, 2 * least - 1])  # one event too few, then enough
    ends = find_ends(SplitSpec(split), RowGroup(offsets, {}), "train")
    window = find_window(offsets[:-1], ends, max_length=10, tail=1)
    assert (window.end - window.begin).tolist() == [0, 2]


def test_events_after_the_first_target_of_the_test_part():
    """Only behind a history: not of users who are all before or all after the split."""
    times = [[1, 2], [5, 6, 7], [1, 5, 6, 7], [1, 5]]
    offsets = np.cumsum([0, *map(len, times)])
    group = RowGroup(offsets, {"timestamp": np.concatenate(times)})
    assert find_later(SplitSpec("time", 5), group, 9).tolist() == [0, 0, 2, 0]
    assert find_later(SplitSpec("time", 5), group, 1).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(("part", "split", "split_time"), CASES)
def test_ranking_samples(data, part, split, split_time):
    path, rows = data
    tasks = ("like", "score")
    options = {"task": "ranking", "tasks": tasks, "candidates": 3, "max_length": 5}
    for batch in load_histories(path, 8, part=part, kind=split, time=split_time, **options):
        batch.check()
        found = batch.candidates["candidates"]
        assert found.lengths.eq(1).all() and not batch.dense
        items = as_ints(type(batch.sequences["history"])(found.values, found.counts))
        labels = batch.sequences["labels"]
        assert labels.values.dtype == torch.float32 and labels.values.shape[1:] == (2,)
        for place, sample in enumerate(samples_of(batch)):
            row = rows[sample]
            history, target = part_of(row, part, split, split_time)
            stop = history if target is None else target + 1
            count = min(3, stop - 1) if target is None else 1
            if stop < 2 or (target is not None and history < 1):
                stop = count = 0
            elif part == "test" and split == "time":  # what follows the target, too
                later = min(2, len(row["item_id"]) - stop)
                stop, count = stop + later, count + later
            before = slice(max(stop - count - 5, 0), stop - count)
            after = slice(stop - count, stop)
            assert as_ints(batch.sequences["history"])[place] == row["item_id"][before]
            assert as_ints(batch.sequences["actions"])[place] == row["action"][before]
            assert items[place] == row["item_id"][after]
            assert (
                as_ints(batch.sequences["candidate_timestamps"])[place] == row["timestamp"][after]
            )
            expected = torch.tensor([row["like"][after], row["score"][after]]).T.reshape(-1, 2)
            assert torch.equal(labels.values.split(labels.lengths.tolist())[place], expected)
            assert [batch.weights[t][place].item() for t in tasks] == [count, count]


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 70),
    world=st.integers(1, 5),
    halo=st.integers(0, 70),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    shuffle=st.booleans(),
    part=st.sampled_from(["train", "test"]),
    task=st.sampled_from(["retrieval", "ranking"]),
    per=st.sampled_from(["sample", "position", "batch"]),
    source=st.sampled_from(["uniform", "popularity"]),
)
def test_ranks_together_are_the_global_batch(
    data, batch, world, halo, share, shuffle, part, task, per, source
):
    options = {
        "per": per,
        "source": source,
        "halo": halo,
        "in_batch_share": share,
        "shuffle": shuffle,
        "part": part,
        "task": task,
        "epochs": 2,
    }
    options |= {"count": 6, "tasks": ("like",), "max_length": 9, "shuffle_groups": 2, "seed": 5}
    whole = load_histories(data[0], batch, **options)
    ranks = [load_histories(data[0], batch, rank=r, world=world, **options) for r in range(world)]
    epoch = -(-USERS // batch)
    assert {len(r) for r in ranks} == {len(whole)} == {2 * epoch}
    for number in sorted({0, epoch // 2, epoch - 1, epoch, 2 * epoch - 1}):
        one, slices = whole.batch(number), [r.batch(number) for r in ranks]
        assert same(SequenceBatch.concat(slices), one)
        edges = [len(one) * r // world for r in range(world + 1)]
        assert [len(s) for s in slices] == [
            b - a for a, b in zip(edges[:-1], edges[1:], strict=True)
        ]


def test_an_empty_rank_has_every_feature(data):
    first, last = (
        load_histories(data[0], 2, rank=r, world=5, count=128, per="sample").batch(0)
        for r in (0, 4)
    )
    assert len(first) == 0 and len(last) == 1
    assert first.parts().keys() == last.parts().keys()
    assert first.dense["negatives"].shape == (0, 128)
    assert [t.dtype for t in first.tensors()] == [t.dtype for t in last.tensors()]


def test_order(data):
    def order(**options) -> list[int]:
        loader = load_histories(data[0], 7, count=0, **options)
        return [s for batch in loader for s in samples_of(batch, options.get("seed", 0))]

    assert order(shuffle=False) == list(range(USERS))
    two = order(epochs=2, shuffle_groups=3)
    first, second = two[:USERS], two[USERS:]
    assert sorted(first) == sorted(second) == list(range(USERS))
    assert first != second and first != list(range(USERS))
    assert first == order(shuffle_groups=3) and first != order(shuffle_groups=3, seed=1)
    # Windows of three permuted row groups, each window shuffled inside: groups never mix over a
    # window's edge.
    groups = [s // GROUP for s in first]
    place, windows = 0, []
    while place < USERS:
        members: list[int] = []
        while place < USERS and (groups[place] in members or len(members) < 3):
            members += [groups[place]] if groups[place] not in members else []
            place += 1
        windows.append(members)
    assert sorted(g for w in windows for g in w) == list(range(9)) and len(windows) == 3
    # the groups are permuted too
    assert [sorted(w) for w in windows] != [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    one_window = order(epochs=2, shuffle_groups=9)
    assert one_window[:USERS] != one_window[USERS:]  # rows are shuffled anew in each epoch
    inside = [s for s in first if s // GROUP in windows[0]]
    assert any(a // GROUP != b // GROUP for a, b in zip(inside[:2], inside[1:3], strict=True))


def test_each_row_group_is_read_once_per_epoch_and_few_are_held(tmp_path, monkeypatch):
    make(tmp_path / "h.parquet", users=96, group=4)
    # Windows of 4 groups are 16 samples; batches of 12 span two windows, and their last samples'
    # negatives come from the first ones.
    loader = load_histories(
        tmp_path / "h.parquet",
        12,
        shuffle_groups=4,
        in_batch_share=0.5,
        per="sample",
        log_q=False,  # which counts items first
        halo=3,
        rank=1,
        world=2,
        epochs=3,
        kept_bytes=0,
    )
    reads: list[int] = []
    read = loader.file.read
    monkeypatch.setattr(
        loader.file, "read", lambda group, columns: (reads.append(group), read(group, columns))[1]
    )
    held = [len(loader._reader.groups) for _ in loader]
    assert max(held) <= 6
    assert len(reads) <= 3 * 24, len(reads)
    assert set(reads) == set(range(24))
    # a file that fits in memory is read once
    kept = load_histories(tmp_path / "h.parquet", 12, shuffle_groups=4, epochs=3, source="uniform")
    monkeypatch.setattr(
        kept.file, "read", lambda group, columns: (reads.append(group), read(group, columns))[1]
    )
    reads.clear()
    assert len(list(kept)) == 24 and sorted(reads) == list(range(24))


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_a_file_in_memory_gives_the_batches_of_its_row_groups(data, part):
    whole, groups = (
        load_histories(data[0], 10, part=part, rank=1, world=2, epochs=2, **options)
        for options in ({}, {"kept_bytes": 0})
    )
    assert groups.file.num_groups > 1
    for one, other in zip(whole, groups, strict=True):
        assert all(map(torch.equal, one.tensors(), other.tensors()))
    assert len(whole._reader.groups) == 1 < len(groups._reader.groups)


def test_negatives_come_from_the_halo_or_from_everywhere(data):
    path, rows = data
    loader = load_histories(
        path,
        16,
        count=40,
        per="sample",
        in_batch_share=0.25,
        log_q=False,
        halo=5,
        num_items=1 << 40,
        shuffle=False,
    )
    fallbacks = 0
    for batch in loader:
        targets = as_ints(batch.sequences["targets"])
        for place, negatives in enumerate(batch.dense["negatives"].tolist()):
            following = [targets[(place + step) % len(batch)] for step in range(1, 6)]
            pool = {item for some in following for item in some}
            drawn = negatives[:10]
            assert all(0 <= item < 1 << 40 for item in negatives)
            assert all(item in pool or item > 300 for item in drawn)
            fallbacks += sum(item > 300 for item in drawn)
            if all(following):
                assert all(item in pool for item in drawn)
            if not pool:
                assert all(item > 300 for item in drawn)
            # uniform over 2^40: none of the file's 300
            assert all(item > 300 for item in negatives[10:])
            assert len(set(negatives[10:])) == 30
    empty = sum(len(row["item_id"]) < 4 for row in rows) / USERS
    assert 0 < fallbacks < 10 * USERS * (empty + 0.2)


def test_negatives_cover_sample_and_catalogue_evenly(tmp_path):
    path = tmp_path / "even.parquet"
    table = {
        "user_id": list(range(6)),
        "item_id": [[u] * 4 for u in range(6)],
        "timestamp": [[1, 2, 3, 4]] * 6,
    }
    pq.write_table(pa.table(table), path)
    options = {
        "count": 4000,
        "per": "sample",
        "in_batch_share": 0.5,
        "kind": "none",
        "shuffle": False,
    }
    batch = load_histories(path, 6, halo=3, **options).batch(0)
    for user in range(6):
        counts = torch.bincount(batch.dense["negatives"][user, :2000], minlength=6)
        near = {(user + step) % 6 for step in (1, 2, 3)}
        assert all(
            (560 < int(c) < 780) if item in near else int(c) == 0 for item, c in enumerate(counts)
        )
        everywhere = torch.bincount(batch.dense["negatives"][user, 2000:], minlength=6)
        assert int(everywhere.min()) > 250 and int(everywhere.max()) < 420
    again = load_histories(path, 6, halo=3, epochs=2, **options)
    assert not torch.equal(again.batch(0).dense["negatives"], again.batch(1).dense["negatives"])


@pytest.mark.parametrize("bound", [1, 54_542, (1 << 62) + 5])
def test_uniform_negatives_are_integers_of_their_keys(bound):
    keys, none = derive(3, torch.arange(5)), Jagged(torch.zeros(0), torch.zeros(0, dtype=int))
    options = {"in_batch": 0, "halo": 0, "batch_size": 5}
    drawn = draw_negatives(keys, none, count=9, num_items=bound, **options)
    counters = hash_name("uniform negative"), torch.arange(9)
    assert torch.equal(drawn, integers(derive(keys[:, None], *counters), bound))


def test_short_histories_share_the_negatives_of_the_batch(tmp_path):
    assert choose_negatives_per("position", 1.0) == "position"
    assert choose_negatives_per("sample", 1.0) == "sample"
    for length, per in ((5, "batch"), (40, "sample")):
        path = tmp_path / f"{length}.parquet"
        rows = [[1] * length] * 20 + [[]]
        table = pa.table({"user_id": range(21), "item_id": rows, "timestamp": rows})
        pq.write_table(table, path, row_group_size=8)
        loader = load_histories(path, 4, kind="none", per="auto")
        assert abs(loader.file.mean_length - length) < 2 and loader.negatives.per == per
        assert "negatives" in (loader.batch(0).shared if per == "batch" else loader.batch(0).dense)
        cut = load_histories(path, 4, kind="none", max_length=7, per="auto")
        assert cut.negatives.per == "batch"


def test_negatives_of_positions_and_of_the_batch(data):
    """Every rank draws the same: those of a batch are equal everywhere, in-batch ones included;
    those of a position belong to the sample's position, whoever reads it."""
    options = {"count": 12, "in_batch_share": 0.5, "halo": 3, "num_items": 1 << 40}
    options["log_q"] = False
    for world in (1, 3):
        ranks = [
            load_histories(data[0], 10, rank=r, world=world, per="batch", **options)
            for r in range(world)
        ]
        parts = [rank.batch(1) for rank in ranks]
        whole = SequenceBatch.concat(parts)  # refuses parts whose negatives differ
        negatives = whole.values("negatives")
        assert negatives.shape == (12,) and "negatives" not in whole.dense
        if world == 1:
            first = negatives
            targets = whole.values("targets")
            own = torch.isin(negatives[:6], targets)  # a sample without targets: from everywhere
            assert own.any() and (own | (negatives[:6] > 300)).all()
            assert not torch.isin(negatives[6:], targets).any()
            assert not torch.equal(negatives, ranks[0].batch(2).values("negatives"))
        assert torch.equal(negatives, first)
        ranks = [
            load_histories(data[0], 10, rank=r, world=world, per="position", **options)
            for r in range(world)
        ]
        whole = SequenceBatch.concat([rank.batch(1) for rank in ranks])
        drawn, targets = whole.sequences["negatives"], whole.sequences["targets"]
        assert torch.equal(drawn.lengths, targets.lengths)
        assert drawn.values.shape == (targets.values.numel(), 12)
        if world == 1:
            alone = drawn.values
            assert len(torch.unique(drawn.values[:, 6:])) == drawn.values[:, 6:].numel()
            own = torch.isin(drawn.values[:, :6], targets.values)
            assert own.any() and (own | (drawn.values[:, :6] > 300)).all()
        assert torch.equal(drawn.values, alone)


def test_resume_from_any_batch_is_the_tail(data):
    options = {
        "epochs": 2,
        "rank": 1,
        "world": 3,
        "count": 6,
        "in_batch_share": 0.5,
        "shuffle_groups": 2,
    }
    whole = list(load_histories(data[0], 11, **options))
    for start in range(len(whole) + 1):
        loader = load_histories(data[0], 11, start=start, **options)
        assert len(loader) == len(whole) - start
        tail = list(loader)
        assert len(tail) == len(loader) and all(
            same(a, b) for a, b in zip(tail, whole[start:], strict=True)
        )
    loader = load_histories(data[0], 11, **options)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    assert state["next"] == 3 and loader.state_dict(next=1)["next"] == 1
    other = load_histories(
        data[0], 11, **(options | {"rank": 0, "world": 1})
    )  # another number of ranks
    other.load_state_dict(state)
    full = load_histories(data[0], 11, **(options | {"rank": 0, "world": 1}))
    assert all(same(a, b) for a, b in zip(other, list(full)[3:], strict=True))


def test_state_of_other_data_or_options_is_refused(data, tmp_path):
    state = load_histories(data[0], 11).state_dict()
    make(tmp_path / "other.parquet", seed=1)
    for loader, words in (
        (load_histories(data[0], 12), "global_batch 11, .* 12"),
        (load_histories(data[0], 11, seed=4), "seed 0, .* 4"),
        (load_histories(data[0], 11, shuffle=False), "shuffle True, .* False"),
        (
            load_histories(tmp_path / "other.parquet", 11),
            f"fingerprint '{state['fingerprint']}', .* '",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"start is 99; the run has 5 batches"):
        load_histories(data[0], 11).load_state_dict(state | {"next": 99})


@pytest.mark.parametrize(("split", "split_time"), SPLITS)
def test_item_counts(data, split, split_time):
    path, rows = data
    part = "train" if split == "none" else "test"
    counts = load_histories(
        path, 4, kind=split, time=split_time, part=part, num_items=400
    ).count_items()
    expected = torch.zeros(400, dtype=torch.int64)
    for row in rows:
        for item in row["item_id"][: part_of(row, "train", split, split_time)[0]]:
            expected[item] += 1
    assert torch.equal(counts, expected)


def test_sizes(data):
    path, rows = data
    loader = load_histories(path, 10, epochs=3, start=4)
    assert loader.num_samples == USERS and loader.batches_per_epoch == 6 and len(loader) == 14
    assert loader.num_items == max(item for row in rows for item in row["item_id"]) + 1
    assert len(list(loader)) == 14 and len(list(loader)) == 14  # may be gone through again


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(
            {"global_batch": 0}, "global_batch is 0; it must be 1 or more", id="batch of 0"
        ),
        pytest.param({"rank": 2, "world": 2}, "rank is 2; with 2 ranks", id="rank beyond world"),
        pytest.param({"max_length": 0}, "max_length is 0", id="length of 0"),
        pytest.param(
            {"task": "ranks"},
            "task is 'ranks'; choose one of retrieval, ranking",
            id="unknown task",
        ),
        pytest.param({"part": "dev"}, "part is 'dev'", id="unknown part"),
        pytest.param({"kind": "random"}, "split is 'random'", id="unknown split"),
        pytest.param(
            {"kind": "time"},
            "split 'time' with time None",
            id="split by time without a time",
        ),
        pytest.param(
            {"time": 4},
            "split 'leave-one-out' with time 4",
            id="time without a split by time",
        ),
        pytest.param(
            {"kind": "none", "part": "test"}, "nothing is held out", id="test part of no split"
        ),
        pytest.param({"in_batch_share": 1.5}, "in_batch_share is 1.5", id="share above 1"),
        pytest.param({"epochs": 0}, "epochs is 0", id="0 epochs"),
        pytest.param({"start": 7}, r"start is 7; the run has 6 batches", id="start beyond the end"),
        pytest.param(
            {"task": "ranking"},
            "no label is named; it has 'action', 'like', 'score'",
            id="ranking without labels",
        ),
        pytest.param(
            {"task": "ranking", "tasks": ("like", "share")},
            "has no label column 'share'; it has 'action', 'like'",
            id="unknown label",
        ),
        pytest.param(
            {"num_items": 100},
            r"item id 29\d is not below num_items 100",
            id="item beyond num_items",
        ),
    ],
)
def test_bad_options(data, options, words):
    with pytest.raises(ValueError, match=words):
        load_histories(data[0], **({"global_batch": 10} | options))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        pytest.param(
            {"user_id": [7, 8], "item_id": [[1, 2], [3, -4]], "timestamp": [[1, 2], [3, 4]]},
            "user 8 has item id -4",
            id="negative item id",
        ),
        pytest.param(
            {"user_id": [7, 8], "item_id": [[], [3, 4, 5]], "timestamp": [[], [3, 9, 4]]},
            "user 8 .*timestamp 4 after 9",
            id="times out of order",
        ),
        pytest.param(
            {"user_id": [7, 8], "item_id": [[1], [3, 4]], "timestamp": [[1], [3]]},
            "user 8 .* different lengths",
            id="different lengths",
        ),
        pytest.param(
            {"user_id": [7], "item_id": [[1, None]], "timestamp": [[1, 3]]},
            "'item_id' has null",
            id="null in a history",
        ),
        pytest.param(
            {"user_id": [7, 8], "item_id": [[1, 2], None], "timestamp": [[1, 3], None]},
            "'item_id' has null",
            id="null for a history",
        ),
        pytest.param(
            {"user_id": [7], "item_id": [1], "timestamp": [1]},
            "not a histories file; make one",
            id="no lists",
        ),
        pytest.param(
            {"user_id": ["a"], "item_id": [[1]], "timestamp": [[1]]},
            "'user_id' holds string",
            id="user id is text",
        ),
        pytest.param(
            {"item_id": [[1]], "timestamp": [[1]]}, "'user_id' is missing", id="no user ids"
        ),
        pytest.param(
            {
                "user_id": pa.array([], pa.int64()),
                "item_id": pa.array([], pa.list_(pa.int64())),
                "timestamp": pa.array([], pa.list_(pa.int64())),
            },
            "no users",
            id="no users",
        ),
    ],
)
def test_files_made_elsewhere_are_checked(tmp_path, columns, words):
    path = tmp_path / "histories.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(ValueError, match=words):
        list(load_histories(path, 4))


def test_ids_beyond_what_the_metadata_say(tmp_path):
    path = tmp_path / "histories.parquet"
    about = '{"version": 1, "num_items": 5, "fingerprint": "x"}'
    table = pa.table(
        {"user_id": [7, 8], "item_id": [[1, 2, 3], [3, 9, 4]], "timestamp": [[1, 2, 3], [3, 4, 5]]}
    )
    pq.write_table(table.replace_schema_metadata({"freescale": about}), path)
    with pytest.raises(ValueError, match=r"user 8 has item id 9, not in \[0, 5\); raise num_items"):
        list(load_histories(path, 4))
    with pytest.raises(ValueError, match="no such file"):
        load_histories(tmp_path / "none.parquet", 4)


@pytest.fixture
def one_thread():
    """pyarrow reads and decodes in one thread: its peak does not depend on how its threads are
    scheduled."""
    before = pa.cpu_count(), pa.io_thread_count()
    pa.set_cpu_count(1), pa.set_io_thread_count(1)
    yield
    pa.set_cpu_count(before[0]), pa.set_io_thread_count(before[1])


def test_memory_does_not_grow_with_the_file(tmp_path, one_thread):
    peaks = []
    for users in (2_000, 16_000):
        table = pa.table(
            {
                "user_id": range(users),
                "item_id": [[1] * 50] * users,
                "timestamp": [[1] * 50] * users,
            }
        )
        pq.write_table(table, tmp_path / "h.parquet", row_group_size=100)
        del table
        usual = pa.default_memory_pool()
        pool = pa.proxy_memory_pool(usual)
        pa.set_memory_pool(pool)
        try:
            loader = load_histories(tmp_path / "h.parquet", 64, count=2, kept_bytes=0)
            assert sum(len(batch) for batch in loader) == users
            assert len(loader._reader.groups) <= 10
            peaks.append(pool.max_memory())
        finally:
            pa.set_memory_pool(usual)
    assert peaks[1] < 1.5 * peaks[0] and peaks[1] < 16_000 * 50 * 8, peaks


def test_prefetched_yields_all_and_stops():
    before = threading.active_count()
    assert list(prefetch(range(100), depth=3)) == list(range(100))
    closed, made = [], []

    def source():
        try:
            for number in range(1000):
                made.append(number)
                yield number
        finally:
            closed.append(threading.current_thread().name)

    some = prefetch(source(), depth=2)
    assert [next(some), next(some)] == [0, 1]
    some.close()
    assert closed == ["freescale-prefetch"] and len(made) <= 5
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="depth is 0"):
        prefetch([], depth=0)


def test_prefetched_raises_in_the_consumer():
    def source():
        yield 1
        raise OSError("the disk is gone")

    some = prefetch(source())
    assert next(some) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(some)


def test_prefetched_batches_are_the_batches(data):
    loader = load_histories(data[0], 9, epochs=2)
    assert all(
        same(a, b)
        for a, b in zip(prefetch(loader), list(load_histories(data[0], 9, epochs=2)), strict=True)
    )
