"""Requests and collisions: the expectation against drawn ids, a file against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.loading import build_specs, load_histories

from freescale.data.batches.specs import NegativeSpec
from freescale.data.synthetic.generate import generate
from freescale.embedding.collision import collision_masks
from freescale.simulate.generated_workload import GeneratedWorkload, PooledFeatures
from freescale.simulate.recorded_workload import RecordedWorkload

RANKS = 4


def home(samples: int) -> np.ndarray:
    return np.arange(samples) * RANKS // samples


def test_expected_rows_are_those_of_drawn_ids():
    """Zipf ids drawn one by one, deduplicated per rank and compared by training's own masks."""
    source = GeneratedWorkload(
        64, median=200, cap=1000, items=20_000, popularity=1.0, collisions=None
    )
    random = np.random.default_rng(0)
    mass = np.arange(1, 10_001) ** -1.0
    ends = np.cumsum(mass) / mass.sum()
    drawn, requests = [], []
    for step in range(2):
        lengths = source.get_lengths(step)
        consumer = np.repeat(home(64), lengths)
        items = 2 * np.searchsorted(ends, random.random(len(consumer))) + random.integers(
            0, 2, len(consumer)
        )
        both = np.unique(consumer * 20_000 + items)
        drawn.append(both)
        requests.append(torch.from_numpy(both % 20_000))
    late = collision_masks(*requests)[1].numpy()
    asked = [source.find_requests(step, home(64), RANKS) for step in range(2)]
    demand = source.compute_demand(asked[0], asked[1], None)
    np.testing.assert_allclose(demand.whole.requested, np.bincount(drawn[1] // 20_000), rtol=0.04)
    assert demand.late.requested.sum() == pytest.approx(late.sum(), rel=0.03)
    assert demand.urgent.requested.sum() == 0  # nothing comes after


@pytest.mark.parametrize("target", [0.0, 0.1, 0.5, 0.9])
def test_collisions_are_those_asked_for(target):
    source = GeneratedWorkload(64, median=200, cap=1000, items=50_000, collisions=target)
    asked = [source.find_requests(step, home(64), RANKS) for step in range(3)]
    demand = source.compute_demand(asked[0], asked[1], asked[2])
    assert demand.late.requested.sum() / demand.whole.requested.sum() == pytest.approx(
        target, abs=0.02
    )
    assert demand.urgent.requested.sum() / demand.whole.requested.sum() == pytest.approx(
        target, abs=0.03
    )


def test_strata_of_the_catalogue_do_not_matter():
    rows = []
    for strata in (256, 4096):
        source = GeneratedWorkload(
            64, median=200, cap=1000, items=1_000_000, collisions=None, strata=strata
        )
        one = source.find_requests(0, home(64), RANKS)
        rows.append(source.compute_demand(one, one, one).late.requested.sum())
    assert rows[0] == pytest.approx(rows[1], rel=0.01)


@pytest.fixture(scope="module")
def histories(tmp_path_factory):
    path = tmp_path_factory.mktemp("simulate") / "histories.parquet"
    generate(path, users=300, items=4000, median=30.0, cap=200, seed=3, labels=("liked",))
    return path


READING = {
    "negatives of a sample": {"task": "retrieval", "count": 8},
    "negatives of a position": {"task": "retrieval", "count": 2, "per": "position"},
    "negatives of the batch": {"task": "retrieval", "count": 50, "per": "batch"},
    "candidates": {"task": "ranking", "tasks": ("liked",), "candidates": 3},
}


@pytest.mark.parametrize("task", READING)
def test_a_file_gives_the_rows_that_training_reads(histories, task):
    """Against the batches of training's own ranks."""
    reading = READING[task]
    source = RecordedWorkload(histories, 64, **build_specs(**reading))
    asked = [source.find_requests(step, home(64), RANKS) for step in range(2)]
    demand = source.compute_demand(asked[0], asked[1], None)
    features = {"ranking": ["history", "candidates"]}.get(
        reading["task"], ["history", "targets", "negatives"]
    )
    sets, lookups = [], []
    for step in range(2):
        batches = [
            load_histories(histories, 64, rank, RANKS, **reading).batch(step)
            for rank in range(RANKS)
        ]
        ids = [torch.cat([batch.values(name).flatten() for name in features]) for batch in batches]
        sets.append([set(mine.tolist()) for mine in ids])
        lookups.append([len(mine) for mine in ids])
    before = set().union(*sets[0])
    assert demand.whole.requested.tolist() == [len(mine) for mine in sets[1]]
    assert demand.lookups.tolist() == lookups[1]
    assert demand.late.requested.tolist() == [len(mine & before) for mine in sets[1]]
    assert demand.whole.owned.sum() == demand.whole.requested.sum()
    assert source.describe_error(RANKS).startswith("rows: of all ids")


def test_a_sample_of_the_ids_says_how_far_it_is_off(histories):
    whole, part = (
        RecordedWorkload(histories, 64, negatives=NegativeSpec(0)),
        RecordedWorkload(histories, 64, negatives=NegativeSpec(0), events=600),
    )
    rows = []
    for source in (whole, part):
        one = source.find_requests(0, home(64), RANKS)
        rows.append(source.compute_demand(None, one, None).whole.requested.sum())
    assert "SAMPLED" in part.describe_error(RANKS)
    error = part.estimate_error(part.find_requests(0, home(64), RANKS))
    assert 0 < error < 0.2 and abs(rows[1] / rows[0] - 1) < 4 * error


def test_users_that_come_again_are_noted(histories):
    source = RecordedWorkload(histories, 1000)
    assert len(source.get_lengths(0)) == 1000 and any("REPEATED" in note for note in source.notes)
    assert source._batch(0).sample.max() == 999


def test_expected_rows_of_pooled_features_are_those_of_drawn_ids():
    features = PooledFeatures(features=3, ids=4, rows=500, popularity=1.0)
    samples = np.array([20, 60])
    expected = features.compute_demand(samples, samples, None)
    generator, rounds = np.random.default_rng(0), 200
    chance = 1 / np.arange(1, 501)
    whole, late = np.zeros(2), np.zeros(2)
    for _ in range(rounds * features.features):
        before, now = (
            [set(generator.choice(500, 4 * n, p=chance / chance.sum())) for n in samples]
            for _ in range(2)
        )
        whole += [len(read) for read in now]
        late += [len(read & set.union(*before)) for read in now]
    np.testing.assert_allclose(expected.whole.requested, whole / rounds, rtol=0.02)
    np.testing.assert_allclose(expected.late.requested, late / rounds, rtol=0.02)
    assert not expected.urgent.requested.any()
    assert expected.ids.tolist() == [240, 720] and expected.bags.tolist() == [60, 180]


def test_bad_workloads_are_refused(tmp_path):
    with pytest.raises(ValueError, match="collisions is 1.5"):
        GeneratedWorkload(8, collisions=1.5)
    with pytest.raises(ValueError, match="out of reach"):
        GeneratedWorkload(1, median=2, cap=2, items=1_000_000, collisions=1.0).find_requests(
            0, np.zeros(1, np.int64), 1
        )
    with pytest.raises(ValueError, match="no such file"):
        RecordedWorkload(tmp_path / "none.parquet", 8)
