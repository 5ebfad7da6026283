"""How a dynamic table grows in the simulator: beside the decisions of the table itself, and beside
draws."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.loading import build_specs, load_histories

from freescale.config import SimulateConfig
from freescale.embedding.dynamic.directory import Directory
from freescale.embedding.dynamic_rules import SHARDS, Dynamic, Seen
from freescale.embedding.layout import compute_keys
from freescale.simulate.generated_workload import GeneratedWorkload
from freescale.simulate.inputs import find_dynamic
from freescale.simulate.placed_tables import _fill_shard, predict_growth
from freescale.simulate.recorded_workload import RecordedWorkload
from freescale.simulate.run import run_simulation


@pytest.mark.parametrize(("mean", "room"), [(30, 244), (230, 244), (244, 244), (400, 244)])
def test_shards_fill_as_hashing_fills_them(mean, room):
    counts = np.arange(0, 1000)
    log = counts * math.log(mean) - mean - np.array([math.lgamma(n + 1) for n in counts])
    expected = float((np.minimum(counts, room) * np.exp(log)).sum())
    assert _fill_shard(mean, room) == pytest.approx(expected, rel=2e-3)


def test_rows_are_those_of_a_directory_that_evicts():
    rules = Dynamic(50 * SHARDS, evict="lru")
    directory, generator = Directory(rules, 0, rules.shards), np.random.default_rng(0)
    seen, steps, rows = set(), [], []
    for _ in range(5):
        ids = generator.integers(-(2**62), 2**62, 60_000)
        seen |= set(ids.tolist())
        keys = compute_keys(torch.from_numpy(ids)).unique().numpy()
        directory.plan(keys)
        steps.append(len(seen))
        rows.append(directory.rows.used)
    found = predict_growth(rules, range(1, 6), steps, 100)
    assert [one.rows for one in found] == pytest.approx(rows, rel=3e-3)
    assert [one.evicts for one in found] == [used < 0.999 * ids for used, ids in zip(rows, steps)]
    assert found[-1].evicts and not found[0].evicts
    assert found[0].fill == pytest.approx(rows[0] / rules.rows, rel=1e-2)
    assert found[2].row_bytes == 100 * found[2].rows


@pytest.mark.parametrize("seen", [1, 3])
def test_generated_ids_are_admitted_as_drawn(seen):
    source = GeneratedWorkload(
        40, median=20, sigma=0.5, cap=100, items=3000, popularity=1.0, collisions=None
    )
    chance = 1.0 / np.repeat(np.arange(1, 1501), 2)
    generator, batches = np.random.default_rng(1), np.zeros(3000, int)
    steps, expected = [1, 4, 12], []
    for step in range(12):
        events = int(source.get_lengths(step).sum())
        batches[np.unique(generator.choice(3000, events, p=chance / chance.sum()))] += 1
        if step + 1 in steps:
            expected.append((batches >= seen).sum())
    found = source.count_admitted(steps, seen, 2)
    assert found == pytest.approx(expected, rel=0.08, abs=3)
    assert source.list_growth_steps(20)[0] == 1


def test_ids_of_a_file_are_admitted_as_in_training(tmp_path):
    generator = np.random.default_rng(0)
    items = [(generator.integers(-9, 9, 6) ** 15).tolist() for _ in range(40)]
    columns = {"user_id": list(range(40)), "item_id": items, "timestamp": [list(range(6))] * 40}
    path = tmp_path / "h.parquet"
    pq.write_table(pa.table(columns), path)
    options = {"any_ids": True, "in_batch_share": 1.0, "count": 3}
    source = RecordedWorkload(path, 4, **build_specs(max_length=10, **options))
    rules = Dynamic(SHARDS * 8, Seen(2))
    directory, used = Directory(rules, 0, rules.shards), []
    data = load_histories(path, 4, max_length=10, seed=0, **options)
    for number in range(6):
        batch = data.batch(number)
        ids = torch.cat([batch.values("history"), batch.values("targets")])
        directory.plan(compute_keys(ids).unique().numpy())
        used.append(directory.rows.used)
    assert source.count_admitted([2, 3, 6], 2, 1) == [used[1], used[2], used[5]]
    assert source.list_growth_steps(7) == [1, 2, 5, 7]
    home = np.arange(4) % 2
    demand = source.compute_demand(None, source.find_requests(0, home, 2), None)
    for rank in range(2):
        mine = [s for s in range(4) if home[s] == rank]
        batch = data.batch(0)
        parts = [batch.sequences[name] for name in ("history", "targets")]
        ids = {i for part in parts for s in mine for i in split(part)[s]}
        ids |= {i for s in mine for i in batch.dense["negatives"][s].tolist()}
        assert demand.whole.requested[rank] == len(ids)


def split(part):
    return [values.tolist() for values in part.values.split(part.lengths.tolist())]


def test_the_command_says_how_the_table_grows():
    config = SimulateConfig(
        rows="item=dynamic:2M:seen=2", items=5_000_000, batch=8, steps=3, schedule="staged",
        preset="paper",
    )  # fmt: skip
    data = run_simulation(config, [4])
    grown = data["growth"]
    assert [one["steps"] for one in grown] == [1, 10, 100, 1000, 10_000, 100_000]
    assert grown[0]["rows"] == 0  # nothing has occurred twice
    fills = [one["fill_percent"] for one in grown]
    assert fills == sorted(fills) and 90 < fills[-1] <= 100
    assert [one["evicts"] for one in grown][-1] and not grown[1]["evicts"]
    lines = [line for line in data["notes"] if "table item: " in line]
    assert "room for 2,002,944 rows" in lines[1] and "sharded (dynamic)" in lines[0]
    assert "after 100,000 steps" in lines[-1] and "rows are evicted" in lines[-1]
    assert find_dynamic(SimulateConfig()) is None
    with pytest.raises(ValueError, match="item=dynamic:50M"):
        find_dynamic(SimulateConfig(rows="item=8GB"))
