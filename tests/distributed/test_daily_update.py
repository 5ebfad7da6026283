"""A run that continues another one on newer data: it begins with the model of that one, to the bit,
in tables that have grown; only new events change it; and it resumes by itself."""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training import assert_close, snapshot
from helpers.updates import (
    UNTIL,
    begin,
    follow,
    list_rows,
    make_events,
    train,
    train_first,
    write_days,
)

import freescale
from freescale.batch import Jagged
from freescale.config import RunConfig
from freescale.data import NegativeSpec, ReadSpec, SampleSpec, SplitSpec, prepare
from freescale.data.batches.loader import Histories
from freescale.data.ingest.ids import read_known
from freescale.embedding.storage.api import draw_initial_rows
from freescale.models import HSTU, Ranking, Retrieval
from freescale.report.runs import read_run
from freescale.train.state import restore
from freescale.train.state.disk import CheckpointFolder, read_state, sum_state
from freescale.train.trainer import Trainer
from freescale.transport.local import LocalTransport


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    return write_days(tmp_path_factory.mktemp("days"))


@pytest.fixture(scope="module")
def first(days):
    return train_first(days[0].parent, days[0])


def load_first(first):
    """The first run's model, from its last checkpoint."""
    run = Trainer(RunConfig.read(first), first, resume=True, transport=LocalTransport())
    run.run_folder.close()
    return run


def assert_state(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def collect(run) -> dict[str, torch.Tensor]:
    """Everything that is trained."""
    tables = {
        f"{name}/{part}": value
        for name in run.model.tables.specs
        for part, value in list_rows(run.model.tables, name).items()
    }
    return tables | {n: p.detach().clone() for n, p in run.model.module.named_parameters()}


@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_it_begins_with_the_model_of_the_first_run(days, first, tmp_path, placement):
    before = load_first(first)
    run = begin(follow(first, days[1], placement=placement), tmp_path / "second")
    spec = run.model.tables.specs["item"]
    known = before.model.tables.specs["item"].rows
    assert spec.rows == len(set(make_events().column("item_id").to_pylist())) > known
    old, new = (list_rows(each.model.tables, "item") for each in (before, run))
    drawn = draw_initial_rows(
        spec, torch.arange(known, spec.rows), 0, run.model.tables.init_std["item"]
    )
    for part, rows in new.items():
        assert torch.equal(rows[:known], old[part]) and rows[:known].any(), part
        assert torch.equal(rows[known:], drawn if part == "rows" else torch.zeros_like(drawn))
    assert_state(*(dict(each.model.module.named_parameters()) for each in (run, before)))
    for mine, theirs in zip(
        run.optimizer.state.values(), before.optimizer.state.values(), strict=True
    ):
        for name, value in theirs.items():
            assert torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(value)), name
    assert run.step == 0 and run.position.number == -1


def test_what_it_writes_about_its_origin(days, first, tmp_path):
    run = train(follow(first, days[1], epochs=1), tmp_path / "second")
    about = json.loads((run.folder / "config.json").read_text())["origin"]
    files = CheckpointFolder(first / "checkpoints")
    (step,) = files.steps()[-1:]
    assert (about["run"], about["step"]) == (str(first), step)
    assert about["checksum"] == sum_state(read_state(files.path(step)))
    assert about["trained_until"] == about["since"] == UNTIL
    line = f"continues {first} from step {step}, trained until {UNTIL}; trains on events later than"
    assert f"{line} {UNTIL}" in run.notes[-1]
    assert any(line in note for note in read_run(run.folder).notes)
    known, now = (
        read_known(folder / "vocabulary.parquet")["item_id"] for folder in (first, run.folder)
    )
    assert now[: len(known)] == known and len(now) > len(known)
    # a third run continues it, after its own last event
    third = follow(run.folder, None)
    assert third.origin.since == max(make_events().column("timestamp").to_pylist())
    with pytest.raises(ValueError, match=f"nothing newer than {third.origin.since} in {days[1]} "):
        begin(third, tmp_path / "third")
    assert not (tmp_path / "third").exists()
    # a run that continues none has no such entry
    assert "origin" not in json.loads((first / "config.json").read_text())


def test_only_new_targets_train(days, first, tmp_path, monkeypatch):
    """As a run over all events in the same batches whose other targets have a weight of 0."""
    config = follow(first, days[1], epochs=1)
    new = train(config, tmp_path / "new")
    every = begin(follow(first, days[1], {"all_events": True}, epochs=1), tmp_path / "every")
    visited = new.data._chosen
    assert 0 < len(visited) < every.data.num_samples
    every.data._chosen = visited
    every.data._open_reader()
    made = every.data.batch

    def weigh(number):
        batch = made(number)
        times = batch.sequences["timestamps"]
        late = []
        for sample in torch.split(times.values, times.lengths.tolist()):
            user = next(u for u in users if contains(u["timestamp"], sample.tolist()))
            at = user["timestamp"].index(int(sample[0]))
            late += [t > UNTIL for t in user["timestamp"][at + 1 : at + 1 + len(sample)]]
        weights = Jagged(torch.tensor(late).float(), times.lengths)
        sums = [float(part.sum()) for part in torch.split(weights.values, times.lengths.tolist())]
        sequences = {**batch.sequences, "target_weights": weights}
        return replace(batch, sequences=sequences, weights={"next_item": torch.tensor(sums)})

    users = pq.read_table(new.histories).to_pylist()
    monkeypatch.setattr(every.data, "batch", weigh)
    every.train()
    assert new.step == every.step > 1
    assert_state(collect(new), collect(every))


def contains(times, part) -> bool:
    return any(times[at : at + len(part)] == part for at in range(len(times)))


def test_all_events_and_since(days, first, tmp_path):
    every = begin(follow(first, days[1], {"all_events": True}), tmp_path / "every")
    assert every.data.num_samples == every.data.file.num_samples
    assert "target_weights" not in every.data.batch(0).sequences
    early = begin(follow(first, days[1], {"since": UNTIL - 5000}), tmp_path / "early")
    late = begin(follow(first, days[1]), tmp_path / "late")
    assert late.data.num_samples < early.data.num_samples <= every.data.num_samples


def test_settings_are_those_of_the_first_run(days, first):
    config = follow(first, None, epochs=7, lr=0.5)
    before = RunConfig.read(first)
    assert (config.data, config.model) == (before.data, before.model)
    assert config.train == replace(before.train, epochs=7, lr=0.5)
    with pytest.raises(ValueError, match="--since and --all-events exclude each other"):
        follow(first, days[1], {"since": 3, "all_events": True})


@pytest.mark.parametrize(
    "setting",
    [
        {"width": 16}, {"layers": 2}, {"encoder": "sasrec"}, {"max_length": 50}, {"heads": 2},
        {"task": "ranking", "labels": "click"}, {"row_optimizer": "sgd"},
        {"rows": "item=dynamic:1K"}, {"columns": "time=order"}, {"items": "items.csv"},
        {"features": "channel"},
    ],
)  # fmt: skip
def test_settings_of_the_model_are_refused(days, first, setting):
    name, value = next(iter(setting.items()))
    option = name.replace("_", "-")
    with pytest.raises(ValueError, match=f"--{option} {value} with --from {first}: its model was"):
        follow(first, days[1], **setting)


def test_runs_that_cannot_be_continued(days, first, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(first / "config.json", empty)
    with pytest.raises(ValueError, match=f"{empty} holds no checkpoint"):
        follow(empty, days[1])
    with pytest.raises(ValueError, match="has no checkpoint of step 5; it has "):
        follow(first, days[1], {"checkpoint": "5"})
    with pytest.raises(ValueError, match="has no best checkpoint"):
        follow(first, days[1], {"checkpoint": "best"})
    with open(first / ".lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=f"{first} is still being trained .process "):
            follow(first, days[1])
    config = follow(first, days[1])
    other = replace(config, origin=replace(config.origin, checksum=1))
    with pytest.raises(ValueError, match="has changed since this run was begun"):
        begin(other, tmp_path / "other")


def test_times_in_another_unit_are_refused(first, tmp_path):
    events = make_events()
    times = pa.array(events.column("timestamp").to_numpy() * 1000)
    pq.write_table(events.set_column(2, "timestamp", times), tmp_path / "ms.parquet")
    with pytest.raises(ValueError, match="times are in ms, and those that .* on in s:"):
        begin(follow(first, tmp_path / "ms.parquet"), tmp_path / "second")


def test_an_older_run_is_read_again(days, first, tmp_path):
    """It does not say until when it was trained; its data does, if that is as it was."""
    data = tmp_path / "old.parquet"
    shutil.copy(days[0], data)
    older = train_first(tmp_path, data)
    (path,) = (older / "checkpoints").glob("step-*/state.json")
    state = json.loads(path.read_text())
    assert state["progress"].pop("trained_until") == UNTIL
    state["checksum"] = sum_state({n: value for n, value in state.items() if n != "checksum"})
    path.write_text(json.dumps(state))
    assert follow(older, days[1]).origin.since == UNTIL
    pq.write_table(make_events(), data)
    with pytest.raises(ValueError, match="its data has changed since: give --since TIME"):
        follow(older, days[1])
    data.unlink()
    with pytest.raises(ValueError, match="no such file.*: give --since TIME"):
        follow(older, days[1])
    assert follow(older, days[1], {"since": 5}).origin.since == 5
    assert follow(older, days[1], {"all_events": True}).origin.since is None


def test_data_may_lack_items_that_the_run_knows(tmp_path):
    """Integer ids: the last ones of the first run are not in the new data, nor are its users."""
    events = make_events(text=False)
    few = events.filter(pa.array(events.column("item_id").to_numpy() < 50)).slice(200)
    pq.write_table(events, tmp_path / "old.parquet")
    late = few.set_column(2, "timestamp", pa.array(few.column("timestamp").to_numpy() + 10**6))
    pq.write_table(late, tmp_path / "few.parquet")
    first = train_first(tmp_path, tmp_path / "old.parquet", split="leave-one-out")
    run = train(follow(first, tmp_path / "few.parquet"), tmp_path / "second")
    assert run.model.tables.specs["item"].rows == 85
    again = Trainer(RunConfig.read(run.folder), run.folder, resume=True, transport=LocalTransport())
    assert again.evaluate("test") == run.evaluate("test")


# ---- ranks, schedules, resume


def train_ranks(transport, config, folder, resume=False, **settings):
    config = replace(config, train=replace(config.train, **settings))
    run = Trainer(config, folder, transport=transport, resume=resume)
    run.train()
    tables = run.model.tables
    found = {}
    for name, spec in tables.specs.items():
        ids = tables.get_group(name).rows.get_ids(name)
        for part, local in tables.get_local_state(name).items():
            whole = torch.zeros(spec.rows, *local.shape[1:])
            whole[ids] = local
            if transport.world > 1 and tables.placements[name].kind == "sharded":
                transport.all_reduce(whole, "dense").wait()
            found[f"{name}/{part}"] = whole
    return found | {n: p.detach().clone() for n, p in run.model.module.named_parameters()}


def test_ranks_and_schedules_change_nothing(days, first, tmp_path):
    config = follow(first, days[1], balance="none")
    alone = train_ranks(LocalTransport(), config, tmp_path / "alone")
    serial = train_ranks(LocalTransport(), config, tmp_path / "serial", schedule="serial")
    assert_state(serial, alone)
    for world in (2, 3):
        for found in run_ranks(world, train_ranks, config, tmp_path / f"of-{world}"):
            for name, value in alone.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def train_exactly(transport, path, schedule="serial", task="retrieval"):
    """In float64: with targets that do not count, users that are not visited and dropout."""
    data = Histories(
        path, 7, rank=transport.rank, world=transport.world,
        sample=SampleSpec(task=task, tasks=("click",), max_length=6, candidates=3),
        split=SplitSpec("none", since=UNTIL), read=ReadSpec(epochs=3),
        negatives=NegativeSpec(count=4, per="batch", in_batch_share=0.5),
    )  # fmt: skip
    torch.manual_seed(0)
    encoder = HSTU(width=8, layers=2, heads=2, max_length=12, dropout=0.3)
    sizes = {"num_items": data.num_items, "table_device": "meta"}
    module = Retrieval(encoder, **sizes)
    if task == "ranking":
        module = Ranking(encoder, tasks=("click",), **sizes)
    model = freescale.parallelize(
        module.double(), module.features, freescale.Adam(lr=0.1), transport=transport,
        placement="sharded", init_std=0.3,
    )  # fmt: skip
    dense = torch.optim.SGD(model.dense_parameters(), lr=0.1)
    pipeline = freescale.Pipeline(model, dense, schedule=schedule, clip=1.0)
    losses = [result.loss for result in pipeline.run(data)]
    pipeline.close()
    return losses, snapshot(model)


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
def test_new_events_on_any_number_of_ranks(days, task):
    path = prepare(days[1], days[0].parent / "cache")
    work = partial(train_exactly, path=path, task=task)
    expected, tables = work(LocalTransport())
    assert len(expected) > 6 and all(np.isfinite(expected))
    losses, staged = work(LocalTransport(), schedule="staged")
    assert losses == expected
    assert_state(staged, tables)
    for losses, found in run_ranks(2, work):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert_close(found, tables)
    (losses, found), (theirs, others) = (
        run_ranks(2, partial(work, schedule=schedule))[0] for schedule in ("serial", "staged")
    )
    assert losses == theirs
    assert_state(found, others)


def begin_ranks(transport, config, folder):
    """The tables before the first step, gathered; their rows arrive in several pieces."""
    restore._AT_ONCE = 7
    run = Trainer(config, folder, transport=transport)
    found = {}
    for name, spec in run.model.tables.specs.items():
        ids = run.model.tables.get_group(name).rows.get_ids(name)
        for part, local in run.model.tables.get_local_state(name).items():
            whole = torch.zeros(spec.rows, *local.shape[1:])
            whole[ids] = local
            found[f"{name}/{part}"] = transport.all_reduce(whole, "dense").wait()
    return found


@pytest.mark.parametrize("full_every", [1, 3])
def test_tables_grow_on_any_number_of_ranks(days, tmp_path, full_every):
    """Also from a chain of deltas."""
    chain = {"full_every": full_every, "checkpoint_every": 3, "keep_checkpoints": 5}
    first = train_first(tmp_path, days[0], **chain)
    config = follow(first, days[1])
    run = begin(config, tmp_path / "alone")
    alone = {f"item/{part}": value for part, value in list_rows(run.model.tables, "item").items()}
    old = list_rows(load_first(first).model.tables, "item")
    for part, value in old.items():
        assert torch.equal(alone[f"item/{part}"][: len(value)], value)
    for found in run_ranks(3, begin_ranks, config, tmp_path / "three"):
        assert_state(found, alone)


def test_it_resumes_to_the_bit_without_the_first_run(days, tmp_path):
    """Also its resume on two ranks, whose sums round otherwise."""
    first = train_first(tmp_path, days[0])
    config = follow(first, days[1], epochs=4, checkpoint_every=3)
    whole = train(config, tmp_path / "whole")
    limited = replace(config, train=replace(config.train, steps=whole.total // 2))
    for name in ("part", "of-2"):
        train(limited, tmp_path / name)
    shutil.rmtree(first)
    resumed = RunConfig.read(tmp_path / "part")
    assert resumed.origin.kept == str(tmp_path / "part" / "origin")
    resumed = replace(resumed, train=replace(resumed.train, steps=None))
    part = train(resumed, tmp_path / "part", resume=True)
    assert part.step == whole.step and part.histories == whole.histories
    assert_state(collect(part), collect(whole))
    for found in run_ranks(2, train_ranks, resumed, tmp_path / "of-2", True):
        for name, value in collect(whole).items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    # the same command after the end continues nothing
    again = Trainer(
        RunConfig.read(part.folder), part.folder, resume="auto", transport=LocalTransport()
    )
    assert again.is_complete
    fresh = tmp_path / "fresh"
    with pytest.raises(ValueError, match="first/checkpoints/step-"):
        begin(replace(config, origin=replace(config.origin, kept=resumed.origin.kept)), fresh)


# ---- features, ranking, dynamic tables


def write_items(path, count):
    ids = np.arange(count)
    pq.write_table(
        pa.table(
            {"item_id": [f"i{n}" for n in ids], "kind": [f"k{n % 7}" for n in ids],
             "price": ids % 13 * 1.5}
        ),
        path,
    )  # fmt: skip


def test_features_keep_their_codes(days, tmp_path):
    """A grown file of items: categories and buckets are those of the first run, an item's own row
    counts by all events so far, and no less than before."""
    for name, count in (("few", 70), ("many", 95)):
        write_items(tmp_path / f"{name}.parquet", count)
    features = "kind,price=numeric:4,channel"
    files = {"items": str(tmp_path / "few.parquet"), "features": features}
    first = train_first(tmp_path, days[0], **files)
    before = load_first(first)
    config = follow(first, days[1], items=str(tmp_path / "many.parquet"))
    run = train(config, tmp_path / "second")
    old, new = before.data.features, run.data.features
    assert (old.item, old.event) == (new.item, new.event)
    assert old.num_items == 70 and new.num_items == 95
    codes, own = old.find_items(torch.arange(70))
    codes_now, own_now = new.find_items(torch.arange(95))
    assert torch.equal(codes_now[:70], codes) and (own_now[:70] >= own).all()
    events = make_events().column("item_id").to_pylist()
    texts = read_known(run.folder / "vocabulary.parquet")["item_id"]
    assert sorted(texts) == sorted(f"i{n}" for n in range(95))
    counts = np.array([events.count(text) for text in texts])
    np.testing.assert_allclose(own_now.numpy(), counts / (counts + 10), rtol=1e-6)
    new_kinds = codes_now[70:, 0].tolist()
    same = {int(codes[texts.index(f"i{n}"), 0]): n % 7 for n in range(60)}
    assert [same[code] for code in new_kinds] == [int(text[1:]) % 7 for text in texts[70:]]
    # by itself, and for evaluation
    shutil.rmtree(first)
    kept = RunConfig.read(run.folder)
    again = Trainer(kept, run.folder, resume=True, transport=LocalTransport())
    assert again.data.features.fingerprint == new.fingerprint
    assert again.data.features.folder == new.folder


@pytest.mark.parametrize("task", ["ranking", "retrieval"])
def test_actions_and_ranking(days, tmp_path, task):
    settings = {"columns": "action=channel", "task": task}
    settings |= {"labels": "click", "candidates": 3} if task == "ranking" else {}
    first = train_first(tmp_path, days[0], **settings)
    before = load_first(first)
    run = begin(follow(first, days[1]), tmp_path / "second")
    old, new = (list_rows(each.model.tables, "action")["rows"] for each in (before, run))
    assert (len(old), len(new)) == (3, 6) and torch.equal(new[:3], old)
    train(follow(first, days[1]), tmp_path / "third")


DYNAMIC = {"rows": "item=dynamic:1K", "split": "leave-one-out"}


def test_a_dynamic_table_goes_on(days, tmp_path):
    first = train_first(tmp_path, days[0], **DYNAMIC)
    run = begin(follow(first, days[1]), tmp_path / "second")
    before = load_first(first)
    for get in (
        lambda tables: tables.get_local_state("item"),
        lambda tables: tables.get_group("item").rows.get_shard_tensors(),
    ):
        assert_state(get(run.model.tables), get(before.model.tables))
    rows = count_rows(run)
    assert rows == count_rows(before) > 20
    run.train()
    assert count_rows(run) > rows


def count_rows(run) -> int:
    return len(run.model.tables.get_local_rows("item")[0])


def test_evaluation_leaves_a_dynamic_table_alone(days, tmp_path):
    """It admits no id, counts none and touches no row."""
    first = train_first(tmp_path, days[0], **DYNAMIC)
    run = begin(follow(first, days[1]), tmp_path / "second")
    tables = run.model.tables

    def read():
        both = tables.get_local_state("item"), tables.get_group("item").rows.get_shard_tensors()
        return [{name: value.clone() for name, value in each.items()} for each in both]

    before = read()
    known = set(tables.get_local_rows("item")[0].tolist())
    metrics = run.evaluate("test")["model"]
    assert metrics["hr@10"] >= 0
    for now, then in zip(read(), before, strict=True):
        assert_state(now, then)
    assert set(tables.get_local_rows("item")[0].tolist()) == known


def test_rows_in_host_memory_grow(days, tmp_path):
    first = train_first(tmp_path, days[0], placement="item=host:1MB")
    old = list_rows(load_first(first).model.tables, "item")
    run = begin(follow(first, days[1]), tmp_path / "second")
    new = list_rows(run.model.tables, "item")
    for part, value in old.items():
        assert torch.equal(new[part][: len(value)], value)
    run.train()


def test_the_full_softmax_grows(days, tmp_path):
    first = train_first(tmp_path, days[0], negatives_from="all", negatives=None)
    run = begin(follow(first, days[1]), tmp_path / "second")
    assert run.data.negatives.count == run.data.num_items > 60
