"""A run with features, simulated: their tables are placed and exchanged as in training, and the
tokens of the users count in the compute and in the balancer's cost."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from freescale.balance.cost import CostModel
from freescale.config import RunConfig, SimulateConfig
from freescale.simulate import simulator
from freescale.simulate.compute import Load, load_calibration
from freescale.simulate.inputs import (
    build_model,
    list_omissions,
    list_settings,
    read_trained_run,
    read_workload,
)
from freescale.simulate.network import load_preset
from freescale.simulate.placed_tables import ITEM, place_tables
from freescale.simulate.run import run_simulation
from freescale.simulate.simulator import Cluster, Setting, plan_batches, simulate
from freescale.simulate.verdict import GIVEN
from freescale.train.build import build_model as build_sharded
from freescale.train.build import load_histories, prepare_data
from freescale.transport.local import LocalTransport

RANKS = 2
CROSS = "brand*category=cross:200000"  # 200,000 rows of 512 bytes: over the budget
FEW = {"row_optimizer": "sgd", "negatives": 1, "max_length": 3}  # shards the item table


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated")
    lines = [f"{u},{(u * 7 + e * e) % 300},{e},{e % 3}" for u in range(60) for e in range(20)]
    (folder / "sales.csv").write_text("user_id,item_id,timestamp,page\n" + "\n".join(lines) + "\n")
    items = [f"{n},{n % 7},b{n % 11},{n}.5" for n in range(310)]
    (folder / "items.csv").write_text("item_id,category,brand,price\n" + "\n".join(items) + "\n")
    users = [f"{n},{n % 5},c{n % 3}" for n in range(60)]
    (folder / "users.csv").write_text("user_id,age,city\n" + "\n".join(users) + "\n")
    return folder


def configure(files, folder, **settings):
    given = {"data": "sales.csv", "items": "items.csv", "users": "users.csv"}
    given = {name: str(files / path) for name, path in given.items()}
    settings = {"features": "auto", "global_batch": 16, "max_length": 30} | settings
    config = RunConfig.from_settings({**given, "cache": str(folder), **settings})
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config.to_json())
    (folder / "ledger.json").write_text(json.dumps({"ranks": 1, "measured_steps": 0}))
    return config


def build(config, folder):
    options = list_settings(read_trained_run(folder))
    return build_model(SimulateConfig(**options), load_preset("paper"), config)


@pytest.mark.parametrize("settings", [{}, FEW, {"negatives_per": "batch"}])
def test_tables_are_placed_as_training_places_them(files, tmp_path, settings):
    config = configure(files, tmp_path, **settings)
    placed = place_tables("auto", build(config, tmp_path), read_workload(config, 16), 1)
    data = load_histories(config, prepare_data(config), LocalTransport())
    model = build_sharded(config, data, LocalTransport())
    model.tables.place(data.batch(0))
    assert placed.placements == model.tables.placements
    assert {"item_features", "event_features", "user_features"} < set(placed.rows)
    dense = sum(parameter.numel() for parameter in model.dense_parameters())
    assert build(config, tmp_path).parameters == dense


def test_requests_are_those_of_all_sharded_tables(files, tmp_path):
    config = configure(files, tmp_path, **FEW, features=f"age,page,{CROSS}")
    source, model = read_workload(config, 16), build(config, tmp_path)
    before = place_tables("auto", model, source, RANKS)
    source.shard_large_tables(model, RANKS)
    after = place_tables("auto", model, source, RANKS)
    assert after.placements["item_features"].kind == "sharded" and after.sharded
    assert before.placements == after.placements
    # the other tables are too small to matter: one AllReduce
    whole = sum(rows for name, rows in after.rows.items() if name not in (ITEM, "item_features"))
    assert after.replicated_rows == whole
    home = np.arange(16) * RANKS // 16
    demand = source.compute_demand(None, source.find_requests(0, home, RANKS), None)
    path, requested, lookups = prepare_data(config), [], []
    for rank in range(RANKS):
        transport = LocalTransport()
        transport.rank, transport.world = rank, RANKS
        batch = load_histories(config, path, transport).batch(0)
        names = ("history", "targets", "negatives")
        ids = np.concatenate([batch.values(name).reshape(-1) for name in names])
        codes = np.concatenate([batch.values(f"{name}_features").reshape(-1) for name in names])
        requested.append(len(np.unique(ids)) + len(np.unique(codes)))
        lookups.append(len(ids) + len(codes))
    assert demand.whole.requested.tolist() == requested
    assert demand.lookups.tolist() == lookups


def test_features_of_a_run_add_to_what_it_sends(files, tmp_path):
    sent = {}
    for features in ("none", "age,city", f"age,city,{CROSS}"):
        folder = tmp_path / features[-4:]
        configure(files, folder, **FEW, features=features)
        settings = list_settings(read_trained_run(folder)) | {"steps": 3, "run": str(folder)}
        settings |= {"schedule": "staged", "out": str(folder / "out")}
        data = run_simulation(SimulateConfig(**settings), [RANKS])
        omitted = any("sums of the rows of features" in note for note in data["notes"])
        assert omitted == (features != "none")
        arm = re.sub("[^a-z]+", "-", GIVEN.lower())
        ledger = folder / "out" / f"{RANKS}-{arm}" / "ledger.json"
        sent[features] = json.loads(ledger.read_text())["bytes_per_step"]
    none, small, large = sent.values()
    for kind in ("rows", "ids"):  # small tables are replicated; negatives are of further items
        assert small[kind] == pytest.approx(none[kind], rel=0.05)
        assert large[kind] > 1.2 * none[kind]


def test_a_load_with_a_prefix_is_that_of_longer_samples():
    lengths, rank_of = np.array([3, 0, 7, 5]), np.array([0, 1, 1, 0])
    short, long = (Load.from_assignment(each, rank_of, 2) for each in (lengths, lengths + 4))
    for name in ("samples", "tokens", "squares"):
        np.testing.assert_array_equal(getattr(short.with_prefix(4), name), getattr(long, name))


def test_tokens_of_users_count_in_compute_and_cost(files, tmp_path, monkeypatch):
    config = configure(files, tmp_path)
    source, model = read_workload(config, 16), build(config, tmp_path)
    assert model.prefix == 2
    assert build(configure(files, tmp_path / "none", features="none"), tmp_path).prefix == 0
    costs, times = {}, {}
    balancer = simulator.Balancer
    for prefix in (0, 2, 100):
        cluster = Cluster(
            replace(model, prefix=prefix),
            load_calibration("h200"),
            load_preset("paper"),
            RANKS,
            0.0,
        )
        monkeypatch.setattr(
            simulator,
            "Balancer",
            lambda partitioner, cost, *, _at=prefix, **options: (
                costs.update({_at: cost}) or balancer(partitioner, cost, **options)
            ),
        )
        batches = plan_batches("greedy", cluster, source, 3)
        steps = simulate(Setting("serial", "none"), cluster, source, 3, planned=batches)
        spans = [span for step in steps for span in step.spans]
        times[prefix] = sum(
            float((end - begin).sum()) for name, begin, end in spans if name == "forward"
        )
    assert isinstance(costs[0], CostModel)
    assert costs[2] == costs[0].with_prefix(2) and costs[100] == costs[0].with_prefix(100)
    assert times[0] < times[2] < times[100]


def test_what_a_run_without_features_omits(files, tmp_path):
    assert list_omissions(configure(files, tmp_path, features="none")) == []
