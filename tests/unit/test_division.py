"""Dividing histories: the plan is a partition by cost, and pieces lose nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.divided_cases import make_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.division import cut_samples, divide
from freescale.balance.shuffle import measure_samples
from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig, parse_split
from freescale.models.heads import Retrieval
from freescale.models.sasrec import SASRec
from freescale.pipeline.parts_exchange import PartsExchange
from freescale.transport.local import LocalTransport
from freescale.visible import Visible

COSTS = st.sampled_from(
    [
        CostModel(1.0, 0.0),
        CostModel(1.0, 500.0, 3.0),
        CostModel(0.0, 2.0),
        CostModel.balanced_at(9),
        CostModel(1.0, 500.0, visible=Visible(64, 200)),
    ]
)
TABLES = st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 5)), min_size=1, max_size=12)


def make_table(samples):
    return np.array([(events, offered, events + 2 * offered) for events, offered in samples])


@settings(max_examples=150, deadline=None)
@given(TABLES, COSTS, st.integers(2, 8), st.sampled_from(["auto", 2, 3, 7]))
def test_pieces_are_runs_of_equal_cost(samples, cost, ranks, split):
    table = make_table(samples)
    division = divide(table, cost, ranks, split)
    costs = cost(table[:, 0], table[:, 1])
    share = costs.sum() / ranks
    if division is None:
        assert costs.max() <= 1.25 * share or split != "auto" or table[:, 0].max() < 512
        return
    rows, tokens = division.measure(table, cost.visible)
    assert (division.stop > division.start).all()
    for number in range(len(table)):
        own = np.flatnonzero(division.sample == number)
        start, stop = division.start[own], division.stop[own]
        assert start[0] == 0 and stop[-1] == table[number, 0] and (start[1:] == stop[:-1]).all()
        assert division.is_part[own].tolist() == [len(own) > 1] * len(own)
        whole = cost.measure(table[number : number + 1, 0], table[number : number + 1, 1])[0]
        assert rows[own, :3].sum(0) == pytest.approx(whole[:3])
        assert tokens[own].sum() == table[number, 2]
        if len(own) > 1:
            assert costs[number] > share
            events = cost.of(rows[own] * [1, 1, 0, 0])
            # by cost: an edge is rounded to a tile, or to an event
            grain = 128 if table[number, 0] >= 512 * len(own) else 1
            slack = grain * (2 * cost.quadratic * table[number, 0] + cost.linear)
            offered = cost.candidate * table[number, 1]
            assert events.max() - events.min() <= 2 * slack + offered + 1e-6 * costs[number]
    if split == "auto":
        assert (division.stop - division.start)[division.is_part].min() >= 128


@settings(max_examples=100, deadline=None)
@given(TABLES, st.integers(2, 5), st.integers(0, 1000))
def test_routes_of_all_ranks_fit(samples, ranks, seed):
    """What one rank sends another expects, and every part gets exactly the events before it."""
    division = divide(make_table(samples), CostModel(1.0, 50.0), ranks, 4)
    if division is None:
        return
    rank_of = np.random.default_rng(seed).integers(0, ranks, len(division.sample))
    routes = [division.route(rank_of, rank, ranks) for rank in range(ranks)]
    pieces = [np.flatnonzero((rank_of == rank) & division.is_part) for rank in range(ranks)]
    messages = {}
    for rank, route in enumerate(routes):
        assert [other.receive[rank] for other in routes] == list(route.send)
        rows = [(division.sample[p], e) for p in pieces[rank] for e in range(*_events(division, p))]
        ends = np.cumsum([0, *route.events])
        out = [row for part, _ in route.sent for row in rows[ends[part] : ends[part + 1]]]
        at = 0
        for peer, size in enumerate(route.send):
            messages[rank, peer] = out[at : at + size]
            at += size
    for rank, route in enumerate(routes):
        came = [row for peer in range(ranks) for row in messages[peer, rank]]
        for piece, earlier in zip(pieces[rank], route.earlier, strict=True):
            seen = [row for first, last in earlier for row in came[first:last]]
            expected = [(division.sample[piece], e) for e in range(division.start[piece])]
            assert seen == expected


def _events(division, piece):
    return division.start[piece], division.stop[piece]


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
def test_pieces_of_a_batch_join_to_the_batch(task):
    batch = make_batch([9, 2, 30], task, 3, features=True)
    table = measure_samples(batch, "history")
    division = divide(table, CostModel(1.0, 1.0), 3, 4)
    pieces = cut_samples(batch, division.sample, division.stop - division.start, "history")
    assert len(pieces) == 6 and torch.equal(pieces.keys, batch.keys[[0, 1, 2, 2, 2, 2]])
    for name in batch.sequences:
        assert torch.equal(pieces.sequences[name].values, batch.sequences[name].values)
        pieces.sequences[name].check(name)
    last = pieces.slice(5, 6)
    whole = batch.slice(2, 3)
    start = int(division.start[5])
    assert torch.equal(last.sequences["history"].values, whole.sequences["history"].values[start:])
    if task == "ranking":
        assert pieces.candidates["candidates"].counts[2:5].tolist() == [0, 0, 0]
        assert torch.equal(last.sequences["labels"].values, whole.sequences["labels"].values)


def test_a_sequence_of_other_lengths_is_refused():
    batch = make_batch([4, 30], "retrieval", 1)
    other = batch.sequences["history"].select(torch.tensor([1, 0]))
    batch = replace(batch, sequences={**batch.sequences, "other": other})
    division = divide(measure_samples(batch, "history"), CostModel(1.0, 1.0), 2, 2)
    with pytest.raises(ValueError, match="'other' has other lengths than 'history'"):
        cut_samples(batch, division.sample, division.stop - division.start, "history")


def test_values():
    assert parse_split("3") == 3 and parse_split("auto") == "auto"
    for wrong in ("1", 0, "some", "-2"):
        with pytest.raises(ValueError, match="split_histories is"):
            parse_split(wrong)
    with pytest.raises(ValueError, match="adapt=True"):
        Balancer("greedy", adapt=True, split_histories="auto")


@pytest.mark.parametrize(
    ("model", "train", "named"),
    [
        ({"encoder": "sasrec"}, {}, "--encoder sasrec"),
        ({}, {"balance": "none"}, "--balance none"),
        ({}, {"balance_adapt": True}, "--balance-adapt"),
    ],
)
def test_refusals_of_the_settings(model, train, named):
    parts = {"model": ModelConfig(**model), "train": TrainConfig(split_histories="auto", **train)}
    with pytest.raises(ValueError, match=f"--split-histories auto does not go with {named}"):
        RunConfig(data=DataConfig(data="histories.parquet"), **parts)


def test_an_encoder_that_cannot_is_refused_by_name():
    module = Retrieval(SASRec(width=8, layers=1, heads=1, max_length=9), num_items=3)
    with pytest.raises(ValueError, match="with SASRec, only with HSTU"):
        PartsExchange(module, LocalTransport())


def test_off_plans_as_before():
    table = make_table([(5000, 2), (10, 1), (20, 0)])
    home = np.array([0, 1, 1])
    off = Balancer("greedy", CostModel(1.0, 1.0)).plan(1, table, home, 2)
    assert off.division is None and len(off.rank_of) == 3
    split = Balancer("greedy", CostModel(1.0, 1.0), split_histories="auto").plan(1, table, home, 2)
    assert split.division is not None and len(split.rank_of) == 4
    assert split.loads.max() < 0.52 * off.loads.max()


def test_least_gain_decides_too():
    table, home = make_table([(600, 0), (500, 0)]), np.array([0, 1])
    options = {"cost": CostModel(1.0, 1.0), "split_histories": 2}
    assert Balancer("greedy", **options).plan(1, table, home, 2).division is not None
    shy = Balancer("greedy", **options, least_gain=1e9)
    assert shy.plan(1, table, home, 2).division is None
    assert shy.keep(table, home, 2) is not None
