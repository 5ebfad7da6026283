"""Runs in order of time: each window is evaluated before it is trained; ranks, schedules and a
resume change nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from helpers.ranks import run_ranks
from helpers.time_order import DAY, START, configure, write_events
from helpers.training import assert_close, snapshot

import freescale
from freescale.config import RunConfig
from freescale.data import NegativeSpec
from freescale.data.batches.loader import Histories
from freescale.models import HSTU, Ranking, Retrieval
from freescale.report.curves import render_curves
from freescale.report.runs import read_run
from freescale.train.build import (
    build_specs,
    evaluate_part,
    find_cache,
    load_histories,
    prepare_data,
)
from freescale.train.time_order import find_windows
from freescale.train.trainer import Trainer
from freescale.train.update import continue_run
from freescale.transport.local import LocalTransport

RANKING = {"task": "ranking", "anchor_actions": "1,4", "history_pools": "1,2,4"}
TASKS = {"retrieval": {}, "ranking": RANKING}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_events(tmp_path_factory.mktemp("events") / "events.parquet")


@pytest.fixture(params=list(TASKS))
def config(request, data):
    return configure(data.parent, data, **TASKS[request.param])


def run_training(transport, config, folder, resume=False, **settings):
    """Trains, and returns everything that is trained."""
    config = replace(config, train=replace(config.train, **settings))
    run = Trainer(config, folder, transport=transport, resume=resume)
    run.train()
    return snapshot(run.model)


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# ---- windows


def test_each_window_is_evaluated_before_it_is_trained(config, tmp_path):
    """The metrics of each are those of the model that has been trained on the windows before it."""
    ranking = config.model.task == "ranking"
    run = Trainer(config, tmp_path / "run", transport=LocalTransport())
    ends = np.cumsum([-(-size // 16) for size in run.data._sizes]).tolist()
    assert run.data.windows == [START // DAY + n for n in (1, 2, 3, 4)] and len(set(ends)) == 4
    run.train()
    assert run.step == ends[-1] == run.total
    lines = [entry for entry in read_metrics(run.folder) if "window" in entry]
    windows = [
        {"number": n, "from": START + n * DAY, "to": START + (n + 1) * DAY} for n in (2, 3, 4, 5)
    ]
    assert [entry["window"] for entry in lines] == windows
    assert [entry["step"] for entry in lines] == ends
    assert ["test" in entry for entry in lines] == [False, False, False, True]
    # A run that ends with a window has the same figures.
    for line, end, window in zip(lines[:3], ends, run.data.windows[1:], strict=False):
        short = replace(config, train=replace(config.train, steps=end))
        other = Trainer(short, tmp_path / f"until-{end}", transport=LocalTransport())
        other.train()
        found = evaluate_part(
            short, other.model, other.histories, "validation", window=window
        )["model"]  # fmt: skip
        for name, value in line["validation"]["model"].items():
            same = np.isnan(found[name]) if value is None else found[name] == value
            assert same, name
    panels = render_curves([read_run(run.folder)])
    assert ("Validation ne/click" if ranking else "Validation ndcg@10") in panels


def test_the_last_windows_alone_are_trained(data, tmp_path):
    config = configure(data.parent, data, windows=2, evaluate_every=2)
    run = Trainer(config, tmp_path / "run", transport=LocalTransport())
    assert run.data.windows == [START // DAY + n for n in (3, 4)]
    assert run.data.last_time == START + 5 * DAY - 1
    run.train()
    lines = [entry for entry in read_metrics(run.folder) if "window" in entry]
    assert [entry["window"]["number"] for entry in lines] == [5] and "test" in lines[0]
    # The popularity baseline knows all events before the window.
    quality = evaluate_part(config, run.model, run.histories, "test", baseline=True)
    events = pq.read_table(data)
    early = events.filter(events.column("timestamp").to_numpy() < START + 5 * DAY)
    counts = np.bincount(early.column("item_id").to_numpy(), minlength=60)
    test = open_part(config, "test")
    targets = [t for n in range(test.stop) for t in test.batch(n).dense["target"].tolist()]
    hits = [np.sum(counts >= counts[target]) <= 10 for target in targets]
    assert quality["popularity"]["hr@10"] == pytest.approx(np.mean(hits))


def open_part(config, part, **more):
    path = prepare_data(config)
    specs = build_specs(config, part) | find_windows(
        config, path, find_cache(config.data), part, None
    )
    return Histories(path, 16, **(specs | more))


def test_popular_items_are_those_before_the_first_window(data):
    """And every item once more: one that appears later has a probability, too."""
    config = configure(data.parent, data, windows=2, negatives_from="popularity")
    source = open_part(config, "train")
    events = pq.read_table(data)
    early = events.filter(events.column("timestamp").to_numpy() < START + 3 * DAY)
    counts = np.bincount(early.column("item_id").to_numpy(), minlength=60)
    assert source.count_items().tolist() == (counts + 1).tolist()
    weights = (counts + 1) ** 0.75
    expected = np.log(weights / weights.sum()).astype(np.float32)
    assert np.allclose(source._get_sampler().log_q.numpy(), expected, atol=1e-6)


def test_features_are_fitted_before_the_first_window(data, tmp_path):
    """A value that appears later is unknown; a run resumes with the same statistics."""
    events = pq.read_table(data)
    late = events.column("timestamp").to_numpy() >= START + 3 * DAY
    channels = np.where(late, "late", np.array(events.column("channel").to_pylist()))
    place = events.schema.get_field_index("channel")
    path = tmp_path / "events.parquet"
    pq.write_table(events.set_column(place, "channel", [channels]), path)
    config = configure(tmp_path, path, windows=2, features="channel")
    run = Trainer(config, tmp_path / "run", transport=LocalTransport())
    (channel,) = run.data.features.event
    assert channel.categories == ("app", "shop", "web")
    run.train()


# ---- ranks, schedules, resume


def train_exactly(transport, config, schedule="serial", **options):
    """In float64, with negatives of the batch and dropout."""
    task = config.model.task
    negatives = {"negatives": NegativeSpec(count=4, per="batch", in_batch_share=0.5)}
    data = open_part(
        config, "train", rank=transport.rank, world=transport.world,
        **({} if task == "ranking" else negatives),
    )  # fmt: skip
    torch.manual_seed(0)
    encoder = HSTU(width=8, layers=2, heads=2, max_length=20, dropout=0.3)
    sizes = {"num_items": data.num_items, "num_actions": data.num_actions, "table_device": "meta"}
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


@pytest.mark.parametrize("task", list(TASKS))
def test_ranks_and_schedules(data, task):
    config = configure(data.parent, data, **TASKS[task])
    work = partial(train_exactly, config=config)
    expected, tables = work(LocalTransport())
    assert len(expected) > 6 and all(np.isfinite(expected))
    losses, staged = work(LocalTransport(), schedule="staged")
    assert losses == expected
    assert_equal(staged, tables)
    for world in (2, 4):
        for losses, found in run_ranks(world, work):
            assert losses == pytest.approx(expected, rel=1e-12)
            assert_close(found, tables)
    serial, stages = (
        run_ranks(3, partial(work, schedule=schedule))[0] for schedule in ("serial", "staged")
    )
    assert serial[0] == stages[0]
    assert_equal(serial[1], stages[1])


def resume_ranks(transport, config, folder, steps=None):
    return run_training(transport, config, folder, resume=True, steps=steps)


def test_it_resumes_in_the_middle_of_a_window_on_other_ranks(config, tmp_path):
    """To the bit on as many ranks as it goes on with; no window is evaluated twice."""
    config = replace(config, train=replace(config.train, balance="none", checkpoint_every=3))
    whole = run_training(LocalTransport(), config, tmp_path / "whole")
    data = Trainer(config, tmp_path / "sizes", transport=LocalTransport()).data
    ends = [data._firsts[n] for n in (1, 2)]
    middle = ends[0] + 1
    assert middle not in ends
    for name, stops in {"once": (middle,), "twice": (middle, ends[1], ends[1] + 1)}.items():
        folder = tmp_path / name
        run_training(LocalTransport(), config, folder, steps=stops[0])
        for stop in stops[1:]:
            run_ranks(2, resume_ranks, config, folder, stop)
    found = [
        run_ranks(2, resume_ranks, config, tmp_path / name)[0] for name in ("once", "twice")
    ]  # fmt: skip
    assert_equal(*found)
    for name, value in whole.items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-5)
    for name in ("whole", "once", "twice"):
        lines = [entry for entry in read_metrics(tmp_path / name) if "validation" in entry]
        assert [entry["window"]["number"] for entry in lines] == [2, 3, 4], name
    # On one rank it is the uninterrupted run.
    folder = tmp_path / "alone"
    run_training(LocalTransport(), config, folder, steps=middle)
    assert_equal(run_training(LocalTransport(), config, folder, resume=True), whole)


def test_another_window_is_another_run(data, tmp_path):
    config = configure(data.parent, data, steps=3)
    run_training(LocalTransport(), config, tmp_path / "run")
    for change in ({"window": "12h"}, {"windows": 2}):
        other = replace(config, data=replace(config.data, **change))
        with pytest.raises(ValueError, match="the data position was saved with windows '"):
            run_training(LocalTransport(), other, tmp_path / "run", resume=True, steps=9)


def test_evaluation_leaves_a_dynamic_table_as_it_is(tmp_path):
    """Ids of the next window are neither admitted nor counted."""
    data = write_events(tmp_path / "events.parquet", text=True)
    config = configure(tmp_path, data, rows="item=dynamic:4K:seen=2", negatives=4)
    found = {}
    for every in (1, 100):
        run = Trainer(
            replace(config, train=replace(config.train, evaluate_every=every, steps=8)),
            tmp_path / str(every), transport=LocalTransport(),
        )  # fmt: skip
        run.train()
        tables = run.model.tables
        found[every] = tables.get_local_state("item")
        lines = read_metrics(run.folder)
        assert any("validation" in entry for entry in lines) == (every == 1)
    assert_equal(found[1], found[100])


# ---- what a sample has


def write_distinct(folder):
    """Items tell their users, channels their items, and so do the attributes of users."""
    events = pq.read_table(write_events(folder / "plain.parquet"))
    users = events.column("user_id").to_numpy()
    items = 100 * users + np.arange(len(users)) % 100
    columns = {name: events.column(name) for name in ("user_id", "timestamp", "action", "click")}
    table = pa.table({**columns, "item_id": items, "channel": [f"c{n % 7}" for n in items]})
    pq.write_table(table, folder / "events.parquet")
    ids = np.unique(users)[::-1]
    pq.write_table(
        pa.table({"user_id": ids, "name": [f"user {n}" for n in ids]}), folder / "users.parquet"
    )
    return folder / "events.parquet"


@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.parametrize("part", ["train", "test"])
def test_features_are_of_the_user_and_of_the_anchors(tmp_path, task, part):
    path = write_distinct(tmp_path)
    config = configure(
        tmp_path, path, users=str(tmp_path / "users.parquet"), windows=2,
        features="name=categorical,channel,context.channel", **TASKS[task],
    )  # fmt: skip
    data = load_histories(config, prepare_data(config), LocalTransport(), part)
    store, seen = data.features, 0
    (name,), (channel,), (context,) = store.user, store.event, store.context
    for number in range(data.stop):
        batch = data.batch(number)
        history = batch.sequences["history"]
        rows = batch.sequences["event_features"].values[:, 0].tolist()
        items = history.values.tolist()
        assert channel.name_categories(rows) == [f"c{n % 7}" for n in items]
        owners = name.name_categories(batch.dense["user_features"][:, 0].tolist())
        for own, user in zip(history.values.split(history.lengths.tolist()), owners, strict=True):
            assert {f"user {n // 100}" for n in own.tolist()} <= {user}
            seen += len(own)
        if task == "ranking":
            wanted = batch.candidates["candidates"].values
        else:
            wanted = batch.sequences["targets"].values if part == "train" else batch.dense["target"]
        columns = batch.sequences | batch.dense
        found = columns["context_features"]
        found = found if isinstance(found, torch.Tensor) else found.values
        expected = [f"c{n % 7}" for n in wanted.tolist()]
        assert context.name_categories(found[:, 0].tolist()) == expected
    assert seen > 100


def test_windows_without_candidates(data, tmp_path):
    """In the trained windows they are refused; a test window without any has no metrics."""
    config = configure(data.parent, data, **RANKING | {"anchor_actions": "3"})
    with pytest.raises(ValueError, match=r"no sample in the windows that are trained .*actions .3"):
        Trainer(config, tmp_path / "none", transport=LocalTransport())
    events = pq.read_table(data)
    late = events.column("timestamp").to_numpy() >= START + 5 * DAY
    actions = np.where(late, 2, events.column("action").to_numpy())
    path = tmp_path / "events.parquet"
    place = events.schema.get_field_index("action")
    pq.write_table(events.set_column(place, "action", pa.array(actions)), path)
    run = Trainer(
        configure(tmp_path, path, **RANKING), tmp_path / "run", transport=LocalTransport()
    )
    assert run.train()["test"] == {"model": {}}


def test_workers_make_the_same_batches(config, tmp_path):
    alone = run_training(LocalTransport(), config, tmp_path / "alone")
    more = replace(config, data=replace(config.data, workers=2))
    assert_equal(run_training(LocalTransport(), more, tmp_path / "workers"), alone)


# ---- another run goes on


def test_a_run_goes_on_after_the_windows_of_another(data, config, tmp_path):
    """Its windows begin with the test window of the first run, whose model it begins with."""
    table = pq.read_table(data)
    early = tmp_path / "early.parquet"
    pq.write_table(table.filter(pc.less(table["timestamp"], START + 4 * DAY)), early)
    first = Trainer(
        replace(config, data=replace(config.data, data=str(early))),
        tmp_path / "first",
        transport=LocalTransport(),
    )
    first.train()
    assert first.data.windows == [START // DAY + n for n in (1, 2)]
    second = continue_run(first.folder, RunConfig.read(first.folder), {"data": str(data)})
    assert second.origin.since == START + 3 * DAY - 1
    run = Trainer(second, tmp_path / "second", transport=LocalTransport())
    assert_equal(snapshot(run.model), snapshot(first.model))
    assert run.data.windows == [START // DAY + n for n in (3, 4)]
    whole = load_histories(config, prepare_data(config), LocalTransport())
    skipped = sum(-(-size // 16) for size in whole._sizes[:2])
    for number in range(run.data.stop):
        mine, other = run.data.batch(number), whole.batch(skipped + number)
        for name in ("history", "timestamps"):
            assert torch.equal(mine.sequences[name].values, other.sequences[name].values), name
    run.train()
    assert run.step == whole.stop - skipped > 1
    lines = [entry["window"] for entry in read_metrics(run.folder) if "window" in entry]
    assert [line["number"] for line in lines] == [4, 5]  # the second one, and the test window
    third = continue_run(run.folder, RunConfig.read(run.folder), {})
    with pytest.raises(ValueError, match="is complete after .* give newer data"):
        Trainer(third, tmp_path / "third", transport=LocalTransport())
