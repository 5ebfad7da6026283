"""Training with features of every kind: the number of ranks, the schedule and a resume change
nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training import snapshot

import freescale
from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import find_partitioner
from freescale.config import RunConfig
from freescale.data.batches.loader import Histories
from freescale.models import HSTU, Ranking, Retrieval
from freescale.train.build import build_specs, load_features, prepare_data, size_tables
from freescale.train.evaluate_retrieval import evaluate_retrieval
from freescale.transport.local import LocalTransport

USERS, ITEMS = 40, 60
FEATURES = (
    "category,price=numeric:5,tags=multi,category*price=cross:97,channel,amount=numeric:4,"
    "age=numeric:3,hobbies=multi,image,context.channel,context.amount=numeric:4"
)


def write_files(folder):
    """Interactions and items; a few items have no events, a few events no attributes."""
    random = np.random.default_rng(0)
    events = USERS * 9
    items = random.integers(0, ITEMS - 6, events)
    pq.write_table(
        pa.table(
            {
                "user_id": random.integers(0, USERS, events),
                "item_id": items,
                "timestamp": np.arange(events) * 10,
                "channel": random.choice(["web", "app", "shop", ""], events),
                "amount": np.where(random.random(events) < 0.1, np.nan, random.random(events)),
                "click": random.integers(0, 2, events),
            }
        ),
        folder / "events.parquet",
    )
    ids = np.arange(3, ITEMS)
    tags = [random.choice(["new", "sale", "eco"], n, replace=False) for n in ids % 4]
    pq.write_table(
        pa.table(
            {
                "item_id": ids,
                "category": [f"c{n % 7}" if n % 11 else None for n in ids],
                "price": random.lognormal(2, 1, len(ids)),
                "tags": [list(each) for each in tags],
                "image": [list(random.normal(size=5)) if n % 7 else None for n in ids],
            }
        ),
        folder / "items.parquet",
    )


def write_users(folder):
    """Attributes of some users, and of some that have no events."""
    random = np.random.default_rng(1)
    ids = np.arange(4, USERS + 5)
    hobbies = ["|".join(random.choice(["golf", "chess", "yoga"], n, False)) for n in ids % 4]
    pq.write_table(
        pa.table({"user_id": ids, "age": random.integers(18, 90, len(ids)), "hobbies": hobbies}),
        folder / "users.parquet",
    )


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_files(folder)
    write_users(folder)
    return {
        "data": str(folder / "events.parquet"),
        "items": str(folder / "items.parquet"),
        "users": str(folder / "users.parquet"),
        "features": FEATURES,
        "cache": str(folder / "cache"),
        "global_batch": 13,
        "max_length": 12,
        "negatives": 6,
        "id_dropout": 0.2,
        "seed": 3,
    }


def open_data(settings, transport, part="train", shuffle=True, **more):
    config = RunConfig.from_settings({**settings, **more})
    path = prepare_data(config)
    store = load_features(config, path)
    specs = build_specs(config, part)
    specs["read"] = freescale.data.ReadSpec(
        num_items=store.num_items, epochs=4, seed=3, shuffle=shuffle
    )
    return Histories(path, 13, rank=transport.rank, world=transport.world, features=store, **specs)


def build(
    transport, data, task="retrieval", schedule="serial", placement="sharded", balanced=False
):
    torch.manual_seed(0)
    encoder = HSTU(
        width=8, layers=2, heads=2, max_length=20, dropout=0.3, position_bias=True, time_bias=True
    )
    sizes = {
        "num_items": data.num_items,
        "feature_tables": replace(size_tables(data.features), vectors=data.features.load_vectors()),
        "table_device": "meta",
    }
    model = (
        Ranking(encoder, tasks=("click",), **sizes)
        if task == "ranking"
        else Retrieval(encoder, **sizes)
    )
    parallel = freescale.parallelize(
        model.double(), model.features, freescale.Adagrad(lr=0.1), transport=transport,
        placement=placement, init_std=0.3,
    )  # fmt: skip
    cost = CostModel.of_hstu(width=8, layers=2, heads=2, d_qk=4, d_v=4)
    balancer = Balancer(find_partitioner("greedy", "cpu"), cost) if balanced else None
    dense = torch.optim.SGD(parallel.dense_parameters(), lr=0.1)
    pipeline = freescale.Pipeline(parallel, dense, schedule=schedule, clip=1.0, balance=balancer)
    return parallel, pipeline


def train(transport, settings, task, steps=4, **options):
    ranking = {"labels": "click", "features": f"{FEATURES},user*category*hour=cross:997"}
    data = open_data(settings, transport, task=task, **(ranking if task == "ranking" else {}))
    parallel, pipeline = build(transport, data, task, **options)
    losses = [r.loss for r in pipeline.run(data.batch(number) for number in range(steps))]
    pipeline.close()
    return losses, snapshot(parallel)


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
def test_the_number_of_ranks_changes_nothing(settings, task):
    for placement in ("sharded", "replicated"):
        expected, tables = train(LocalTransport(), settings, task, placement=placement)
        wanted = {"item", "item_features", "event_features", "user_features", "context_features"}
        assert {f"{name}/rows" for name in wanted} <= tables.keys()
        for world in (2, 4):
            for losses, found in run_ranks(
                world, partial(train, settings=settings, task=task, placement=placement)
            ):
                assert losses == pytest.approx(expected, rel=1e-12)
                for name, value in tables.items():
                    torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_staged_is_serial_to_the_bit(settings, task, ranks):
    work = partial(train, settings=settings, task=task, steps=8, balanced=ranks > 1)
    serial, staged = (
        run_ranks(ranks, partial(work, schedule=schedule)) for schedule in ("serial", "staged")
    )
    for (losses, tables), (expected, wanted) in zip(staged, serial, strict=True):
        assert losses == expected
        assert all(torch.equal(tables[name], value) for name, value in wanted.items())


def evaluate(transport, settings):
    data = open_data(settings, transport, "test")
    parallel, _ = build(transport, data)
    parallel.tables.place()
    counts = open_data(settings, transport).count_items_of
    return evaluate_retrieval(parallel, data, popularity=counts, features=data.features)


def test_evaluation_over_ranks(settings):
    alone = evaluate(LocalTransport(), settings)
    assert 0 < alone["model"]["cold"] < 1
    for found in run_ranks(3, evaluate, settings):
        assert found["model"] == pytest.approx(alone["model"], rel=1e-12)


def test_by_time_users_of_the_test_part_decide_nothing(settings, tmp_path):
    """Users whose first event is held out are no part of the statistics."""
    events = pq.read_table(settings["data"])
    late = pa.table(
        {name: events.column(name).slice(0, 4) for name in events.column_names}
    ).to_pydict()
    late["user_id"], late["timestamp"] = [USERS + 1] * 4, [10_000, 10_010, 10_020, 10_030]
    both = pa.concat_tables([events, pa.table(late, schema=events.schema)])
    pq.write_table(both, tmp_path / "events.parquet")
    given = {
        **settings, "data": str(tmp_path / "events.parquet"), "split": "time",
        "split_time": 9_000, "features": "age=categorical", "id_dropout": 0.0,
    }  # fmt: skip
    users = pq.read_table(settings["users"]).to_pydict()
    before = open_data(given, LocalTransport()).features.user
    users["age"][users["user_id"].index(USERS + 1)] = 1000
    pq.write_table(pa.table(users), tmp_path / "users.parquet")
    after = open_data({**given, "users": str(tmp_path / "users.parquet")}, LocalTransport())
    assert after.features.user == before and len(before) == 1


def test_an_item_without_events_can_be_recommended(settings):
    """Its score comes from its features: those of an item with the same ones are equal."""
    data = open_data(settings, LocalTransport())
    ids = torch.arange(ITEMS)
    codes, own = data.features.find_items(ids)
    assert data.num_items == ITEMS and not own[ITEMS - 6 :].any()
    events = data.count_items().float()
    assert torch.equal(own[: len(events)], events / (events + 10)) and events[:3].all()
    assert torch.equal(codes[0], codes[1])  # not in the file of items: all features missing
    parallel, _ = build(LocalTransport(), data)
    parallel.tables.place()
    _, rows = parallel.tables.get_local_rows("item")
    batch = freescale.SequenceBatch(dense={"history_features": codes})
    with parallel.reading(batch) as batch, torch.no_grad():
        given = batch.values("history_features"), own, data.features.find_vectors(ids)
        vectors = parallel.module.encode_items(rows, *given)
        moved = parallel.module.encode_items(rows + 1, *given)
    assert torch.equal(vectors[own == 0], moved[own == 0])
    assert not torch.equal(vectors[own > 0], moved[own > 0])


def test_the_context_of_a_position_is_that_of_the_next_event(settings):
    """The same columns describe events and requests here, by the same rows."""
    parts = ("train", "validation", "test")
    train, validation, test = (
        open_data(settings, LocalTransport(), part, shuffle=False) for part in parts
    )
    compared = 0
    for number in range(train.batches_per_epoch):
        requests, following, later = (
            torch.split(batch.sequences[name].values, batch.sequences[name].lengths.tolist())
            for batch, name in (
                (train.batch(number), "context_features"),
                (validation.batch(number), "event_features"),
                (test.batch(number), "event_features"),
            )
        )
        asked = validation.batch(number).dense["context_features"]
        for mine, events, last, request in zip(requests, following, later, asked, strict=True):
            compared += len(mine)
            assert torch.equal(mine, events[len(events) - len(mine) :])
            assert not len(last) or torch.equal(request, last[-1])
    assert compared > 100


def test_ids_drop_out_by_batch_and_item_alone(settings):
    data = open_data(settings, LocalTransport())
    ids = torch.arange(ITEMS)
    _, trained = data.features.find_items(ids)
    first, second = (data.features.find_items(ids, batch)[1] for batch in (0, 1))
    again = data.features.find_items(ids.flip(0), 0)[1].flip(0)
    assert torch.equal(first, again) and not torch.equal(first, second)
    dropped = (trained > 0) & (first == 0)
    assert torch.equal(first[~dropped], trained[~dropped])
    assert 0 < dropped.sum() < (trained > 0).sum() / 2


def test_statistics_come_from_the_training_part_only(settings, tmp_path):
    """What validation and test hold changes nothing of what is fitted."""
    events = pq.read_table(settings["data"]).to_pydict()
    users, seen = np.array(events["user_id"]), {}
    for row in reversed(range(len(users))):
        seen[users[row]] = seen.get(users[row], 0) + 1
        if seen[users[row]] <= 2:
            events["channel"][row], events["amount"][row] = "fax", 1e6
            events["item_id"][row] = ITEMS - 1
    pq.write_table(pa.table(events), tmp_path / "events.parquet")
    items = pq.read_table(settings["items"]).to_pydict()
    items["category"][-1], items["price"][-1] = "only in test", 1e9
    pq.write_table(pa.table(items), tmp_path / "items.parquet")
    changed = {
        **settings, "data": str(tmp_path / "events.parquet"),
        "items": str(tmp_path / "items.parquet"),
    }  # fmt: skip
    before = open_data(settings, LocalTransport()).features
    after = open_data(changed, LocalTransport()).features
    assert before.item == after.item and before.event == after.event
    assert "fax" not in str(after.event) and "only in test" not in str(after.item)
    own = after.find_items(torch.arange(ITEMS))[1]
    assert not own[ITEMS - 1]
