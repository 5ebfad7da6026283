"""The data of a run that continues another one: ids keep their numbers, only new events are
targets, and users without any are not visited."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.updates import OLD, UNTIL, make_events, write_days

from freescale.data import NegativeSpec, ReadSpec, SampleSpec, SplitSpec, histories_writer, prepare
from freescale.data.batches.loader import Histories
from freescale.data.histories import HistoriesFile
from freescale.data.ingest.ids import find_vocabulary, read_known

SPLITS = ("none", "leave-one-out")


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    return write_days(tmp_path_factory.mktemp("days"))


@pytest.fixture(scope="module")
def known(days):
    path = prepare(days[0], days[0].parent / "cache", events=["category.channel"])
    return read_known(find_vocabulary(path))


def test_known_ids_keep_their_numbers(days, known):
    """Whatever the order of the files: the new ones come first here."""
    path = prepare(days[1], days[0].parent / "cache", events=["category.channel"], known=known)
    found = read_known(find_vocabulary(path))
    assert set(found) == {"user_id", "item_id", "category.channel"}
    events = make_events()
    for name, texts in known.items():
        column = events.column(name.removeprefix("category.")).to_pylist()
        assert found[name][: len(texts)] == texts
        assert sorted(found[name]) == sorted(set(column)) and len(found[name]) > len(texts)
    # the same data without them: other numbers, in another place of the cache
    other = prepare(days[1], days[0].parent / "cache", events=["category.channel"])
    assert other != path and read_known(find_vocabulary(other))["item_id"] != found["item_id"]


def test_data_may_lack_what_is_known(tmp_path, known):
    events = make_events().slice(OLD)
    pq.write_table(events, tmp_path / "late.parquet")
    path = prepare(tmp_path / "late.parquet", tmp_path, known=known)
    found = read_known(find_vocabulary(path))
    assert found["item_id"][: len(known["item_id"])] == known["item_id"]
    assert HistoriesFile(path).num_items == len(found["item_id"])


@pytest.mark.parametrize(
    ("text", "known", "message"),
    [
        (
            True,
            {},
            r"ids.parquet: column 'item_id' holds strings, and the run knows integers: give",
        ),
        (
            False,
            {"item_id": ["i1"]},
            "'item_id' holds other ids, as '79', and the run knows ids as",
        ),
        (True, {"item_id": ["7"], "user_id": ["u1"]}, "other ids, as 'i79', .* knows ids as '7'"),
    ],
)
def test_ids_of_another_kind_are_refused(tmp_path, text, known, message):
    events = make_events(text=text)
    if text:  # users stay integers in the first case
        users = make_events(text=False).column("user_id")
        events = events.set_column(0, "user_id", users) if not known else events
    pq.write_table(events, tmp_path / "ids.parquet")
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "ids.parquet", tmp_path, known=known)


def test_integers_that_grow_too_far_are_refused(tmp_path):
    events = pa.table({"user_id": [1, 1], "item_id": [5, 1 << 40], "timestamp": [1, 2]})
    pq.write_table(events, tmp_path / "ids.parquet")
    with pytest.raises(ValueError, match="holds integers up to 1,099,511,627,776"):
        prepare(tmp_path / "ids.parquet", tmp_path, known={})


def test_a_histories_file_has_no_texts(days, tmp_path):
    path = prepare(days[0], tmp_path)
    with pytest.raises(ValueError, match="whose ids are numbers, and the run knows texts of item"):
        prepare(path, tmp_path, known={"item_id": ["i1"]})


# ---- what is trained on


def read_users(path) -> list[dict]:
    return pq.read_table(path).to_pylist()


@pytest.fixture(scope="module")
def path(days, known):
    """In small row groups, many of which have no new event."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(histories_writer, "GROUP_EVENTS", 40)
        made = prepare(days[1], days[0].parent / "small", known=known)
    assert HistoriesFile(made).num_groups > 6
    return made


def open_part(path, kind="none", **options):
    read = {"kept_bytes": 0, "shuffle_groups": 2, **options.pop("read", {})}
    sample = options.pop("sample", {})
    return Histories(
        path, 4, split=SplitSpec(kind, since=UNTIL), sample=SampleSpec(max_length=6, **sample),
        negatives=options.pop("negatives", NegativeSpec(count=3, per="sample", source="uniform")),
        read=ReadSpec(epochs=2, **read), **options,
    )  # fmt: skip


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_only_new_targets_count(path, kind, shuffle):
    data = open_part(path, kind, read={"shuffle": shuffle})
    expected = {}
    for number, user in enumerate(read_users(path)):
        end = len(user["item_id"]) - (2 if kind == "leave-one-out" else 0)
        items, times = user["item_id"][:end], user["timestamp"][:end]
        late = [float(time > UNTIL) for time in times[1:]]
        if any(late):
            expected[number] = (items[:-1][-6:], items[1:][-6:], late[-6:])
    assert 5 < len(expected) < len(read_users(path))
    assert data.num_samples == len(expected) == data._chosen.numel()
    for epoch in range(2):
        found = []
        for number in range(data.batches_per_epoch):
            batch = data.batch(epoch * data.batches_per_epoch + number)
            columns = [batch.sequences[name] for name in ("history", "targets", "target_weights")]
            split = [torch.split(each.values, each.lengths.tolist()) for each in columns]
            found += [tuple(part.tolist() for part in sample) for sample in zip(*split)]
            sums = [float(part.sum()) for part in split[2]]
            assert batch.weights["next_item"].tolist() == sums and min(sums) > 0
        assert sorted(found) == sorted(expected.values())
        if not shuffle:
            assert found == list(expected.values())


def test_batches_are_the_same_on_any_rank_and_in_any_process(path):
    whole = open_part(path)
    parts = [pickle.loads(pickle.dumps(open_part(path, rank=r, world=3))) for r in range(3)]
    for number in range(whole.stop):
        slices = [part.batch(number) for part in parts]
        for name in ("history", "target_weights"):
            joined = torch.cat([batch.sequences[name].values for batch in slices])
            assert torch.equal(joined, whole.batch(number).sequences[name].values)


def test_candidates_of_ranking_are_new_events(path):
    data = open_part(path, sample={"task": "ranking", "tasks": ("click",), "candidates": 3})
    counts = {}
    for user in read_users(path):
        late = sum(time > UNTIL for time in user["timestamp"])
        if count := min(late, 3, len(user["item_id"]) - 1):
            counts[tuple(user["item_id"][-count:])] = user["item_id"][:-count][-6:]
    found = {}
    for number in range(data.batches_per_epoch):
        batch = data.batch(number)
        offered, history = batch.candidates["candidates"], batch.sequences["history"]
        assert (batch.sequences["candidate_timestamps"].values > UNTIL).all()
        for items, past in zip(
            torch.split(offered.values, offered.counts.tolist()),
            torch.split(history.values, history.lengths.tolist()),
            strict=True,
        ):
            found[tuple(items.tolist())] = past.tolist()
        assert torch.equal(batch.weights["click"], offered.counts.float())
    assert found == counts


def test_log_q_is_that_of_the_users_that_are_visited(path):
    """Counted by hand: in-batch negatives come from the targets of visited users alone."""
    data = open_part(path, negatives=NegativeSpec(count=4, per="batch", in_batch_share=1.0))
    shares, empty = data._reader.share_targets()
    expected = np.zeros(data.num_items)
    users = [u for u in read_users(path) if any(t > UNTIL for t in u["timestamp"][1:])]
    for user in users:
        targets = user["item_id"][1:][-6:]
        np.add.at(expected, targets, 1 / len(targets) / len(users))
    assert empty == 0
    np.testing.assert_allclose(shares, expected, atol=1e-12)


@pytest.mark.parametrize("kind", SPLITS)
def test_the_last_time_is_that_of_the_last_event_that_is_trained_on(path, kind):
    data = Histories(path, 4, split=SplitSpec(kind))
    ends = {"none": None, "leave-one-out": -2}[kind]
    times = [user["timestamp"][:ends] for user in read_users(path)]
    assert data.last_time == max(part[-1] for part in times if len(part) >= 2)


def test_only_training_has_a_beginning():
    with pytest.raises(ValueError, match="since is for the part 'train'"):
        SplitSpec("leave-one-out", part="test", since=3)
