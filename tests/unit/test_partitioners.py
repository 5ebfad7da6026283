"""Partitioners: every sample once, counts and caps kept, the definition of each, and what bad
functions get."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freescale.balance.cost import CostModel
from freescale.balance.partitioners.common import sort_descending, trade_samples
from freescale.balance.partitioners.fixed import FixedOnDevice, fixed
from freescale.balance.partitioners.greedy import (
    _place_many_at_a_time,
    _place_one_at_a_time,
    greedy,
    greedy_equal,
)
from freescale.balance.partitioners.karmarkar_karp import karmarkar_karp
from freescale.balance.partitioners.local import local
from freescale.balance.partitioners.lookup import PARTITIONERS, find_partitioner, stay
from freescale.balance.partitioners.variable import Variable, variable
from freescale.balance.problem import Problem, assign

EQUAL_COUNTS = ("fixed", "greedy_equal", "karmarkar_karp")
CAPPED = ("greedy", "local")


def problem_of(lengths, ranks, home=None, cap=None, nodes=None):
    lengths = np.asarray(lengths, np.int64)
    home = np.arange(len(lengths)) % ranks if home is None else np.asarray(home, np.int64)
    return Problem(CostModel.balanced_at(100)(lengths), lengths, home, ranks, cap, nodes)


@st.composite
def problems(draw):
    ranks, samples = draw(st.integers(1, 9)), draw(st.integers(0, 60))
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    lengths = random.integers(0, draw(st.sampled_from([4, 50, 5000])), samples)
    nodes = draw(st.sampled_from([None, random.integers(0, 3, ranks)]))
    problem = problem_of(lengths, ranks, random.integers(0, ranks, samples), nodes=nodes)
    random_costs = random.exponential(size=samples)
    costs = {
        "by length": problem.costs,
        "against length": (5000 - lengths).astype(np.float64),
        "any": random_costs,
        "ties": np.floor(3 * random_costs),
    }
    return replace(problem, costs=costs[draw(st.sampled_from(sorted(costs)))])


TIES = problem_of([10] * 100, 40)  # so many that a sort has to be stable


def smallest_cap(problem):
    """No smaller cap can be met."""
    return max(int(problem.tokens.max()), -(-int(problem.tokens.sum()) // problem.ranks))


@settings(deadline=None, max_examples=150)
@given(problems(), st.sampled_from(sorted(PARTITIONERS)))
def test_every_sample_once_and_honest_figures(problem, name):
    home = problem.home.copy()
    found = assign(problem, PARTITIONERS[name])
    again = assign(problem, PARTITIONERS[name])
    assert np.array_equal(found.rank_of, again.rank_of) and np.array_equal(problem.home, home)
    loads = [0.0] * problem.ranks
    moved = 0
    for sample, rank in enumerate(found.rank_of.tolist()):
        assert 0 <= rank < problem.ranks
        loads[rank] += problem.costs[sample]
        moved += int(problem.tokens[sample]) * (rank != problem.home[sample])
    assert found.loads == pytest.approx(loads) and found.moved_tokens == moved
    n = len(problem.costs)
    assert found.bound == pytest.approx(
        max(sum(loads) / problem.ranks, max(problem.costs, default=0.0))
    )
    assert found.loads.max() >= found.bound * (1 - 1e-12)
    if name in EQUAL_COUNTS and n:
        counts = np.bincount(found.rank_of, minlength=problem.ranks)
        assert counts.max() - counts.min() <= 1


@settings(deadline=None, max_examples=100)
@given(problems(), st.sampled_from(CAPPED), st.floats(1.0, 3.0))
def test_caps_are_kept_or_refused(problem, name, slack):
    if not len(problem.tokens):
        return
    capped = replace(problem, cap=int(smallest_cap(problem) * slack))
    try:
        found = assign(capped, PARTITIONERS[name])
    except ValueError as error:
        assert "fits on no rank under the cap" in str(error)
        assert slack < 2, "with room to spare a cap is always met"
        return
    assert np.bincount(found.rank_of, capped.tokens, capped.ranks).max() <= capped.cap


@pytest.mark.parametrize("name", CAPPED)
def test_a_cap_moves_samples_that_costs_alone_would_leave(name):
    """By cost the three cheap samples share a rank, where only two of them have room."""
    costs, tokens = np.array([10.0, 1.0, 1.0, 1.0]), np.full(4, 5)
    problem = Problem(costs, tokens, np.array([0, 1, 1, 1]), ranks=2, cap=10)
    found = assign(problem, PARTITIONERS[name])
    assert np.bincount(found.rank_of).tolist() == [2, 2]


@settings(deadline=None, max_examples=60)
@given(problems(), st.randoms())
def test_where_samples_are_now_does_not_matter(problem, random):
    """All but `none` and `local` look at costs alone: other homes, the same assignment."""
    homes = list(range(problem.ranks)) * len(problem.home)
    random.shuffle(homes)
    other = Problem(
        problem.costs, problem.tokens, np.array(homes[: len(problem.home)], np.int64), problem.ranks
    )
    for name in set(PARTITIONERS) - {"none", "local"}:
        assert np.array_equal(PARTITIONERS[name](problem), PARTITIONERS[name](other)), name


@pytest.mark.parametrize("name", sorted(PARTITIONERS))
def test_corners(name):
    partitioner = PARTITIONERS[name]
    assert assign(problem_of([], 4, cap=3), partitioner).imbalance == 1.0
    assert assign(problem_of([7, 3, 9], 1), partitioner).rank_of.tolist() == [0, 0, 0]
    assert len(set(assign(problem_of([5, 6], 8), partitioner).rank_of.tolist())) == 2
    equal = assign(problem_of([10] * 64, 16), partitioner)
    assert equal.imbalance == pytest.approx(1.0)
    giant = assign(problem_of([20_000] + [100] * 31, 8, home=np.arange(32) // 4), partitioner)
    if name == "greedy":
        assert (
            giant.above_bound == pytest.approx(0.0)
            and np.sum(giant.rank_of == giant.rank_of[0]) == 1
        )
    if name == "local":
        assert giant.above_bound <= 0.004


def test_fixed_is_the_zig_zag():
    lengths = np.random.default_rng(0).permutation(1000)[:37]
    rank_of, order, n = fixed(problem_of(lengths, 5)), sort_descending(lengths.astype(float)), 5
    for rank in range(n):
        wanted = [
            p for k in range(9) for p in (2 * n * k + rank, 2 * n * (k + 1) - 1 - rank) if p < 37
        ]
        assert sorted(order[wanted].tolist()) == np.flatnonzero(rank_of == rank).tolist()


def place_longest_first(problem):
    """The definition, one sample and one rank at a time."""
    loads, held, rank_of = [0.0] * problem.ranks, [0] * problem.ranks, [-1] * len(problem.costs)
    for sample in sorted(range(len(problem.costs)), key=lambda sample: -problem.costs[sample]):
        after = [tokens + problem.tokens[sample] for tokens in held]
        room = [r for r in range(problem.ranks) if problem.cap is None or after[r] <= problem.cap]
        if not room:
            raise ValueError(f"sample {sample} .* fits on no rank")
        rank = min(room, key=lambda rank: loads[rank])
        rank_of[sample], held[rank] = rank, after[rank]
        loads[rank] += problem.costs[sample]
    return rank_of


@settings(deadline=None, max_examples=150)
@given(problems(), st.sampled_from([None, 1.0, 1.2, 2.0]))
@example(TIES, None)
def test_longest_first(problem, slack):
    if slack is not None and len(problem.tokens):
        problem = replace(problem, cap=int(smallest_cap(problem) * slack))
    try:
        expected = place_longest_first(problem)
    except ValueError as error:
        for place in (_place_one_at_a_time, _place_many_at_a_time):
            with pytest.raises(ValueError, match=str(error)):
                place(problem)
        return
    assert _place_one_at_a_time(problem).tolist() == expected
    assert _place_many_at_a_time(problem).tolist() == expected


def heavy(samples, ranks, seed=0, cap=21_000):
    random = np.random.default_rng(seed)
    lengths = np.clip(np.exp(random.normal(np.log(3000), 1, samples * ranks)), 1, cap).astype(
        np.int64
    )
    costs = CostModel.balanced_at(3072)(lengths)
    return Problem(
        costs, lengths, np.repeat(np.arange(ranks), samples), ranks, nodes=np.arange(ranks) // 8
    )


def test_heavy_tails():
    problem = heavy(32, 32)
    none, best, near = (assign(problem, PARTITIONERS[name]) for name in ("none", "greedy", "local"))
    assert best.above_bound < 0.005 and near.above_bound < 0.01
    assert near.moved_tokens < 0.15 * problem.tokens.sum() < best.moved_tokens
    assert none.straggler_percent > 9 * best.straggler_percent
    few = heavy(8, 32, cap=10**9)
    assert assign(few, greedy).loads.max() < assign(few, karmarkar_karp).loads.max()


def test_local_prefers_the_own_node():
    """Two samples each would be even. Ranks 0 and 5 have too many, ranks 1 and 4 of their nodes
    have room for just those."""
    home = [0, 0, 0, 0, 2, 2, 3, 3, 4, 5, 5, 5]
    problem = problem_of([100] * 12, 6, home, nodes=np.array([0, 0, 1, 1, 2, 2]))
    found = PARTITIONERS["local"](problem)
    assert sorted(found[:4].tolist()) == [0, 0, 1, 1] and sorted(found[9:].tolist()) == [4, 5, 5]
    assert found[4:9].tolist() == home[4:9], "ranks that are not overloaded keep what they have"


def deal_rounds(problem):
    """`greedy_equal` by its definition, a sample at a time."""
    order = sort_descending(problem.costs).tolist()
    loads, rank_of = [0.0] * problem.ranks, [-1] * len(order)
    for start in range(0, len(order), problem.ranks):
        ranks = sorted(range(problem.ranks), key=lambda rank: loads[rank])
        for sample, rank in zip(order[start : start + problem.ranks], ranks):
            rank_of[sample] = rank
            loads[rank] += problem.costs[sample]
    return rank_of


def difference_blocks(problem):
    """`karmarkar_karp` by its definition: a block is a list of (sum, samples), one for each rank,
    by falling sum."""
    order = sort_descending(problem.costs).tolist()
    blocks = []
    for start in range(0, len(order), problem.ranks):
        some = [(problem.costs[i], [i]) for i in order[start : start + problem.ranks]]
        blocks.append(some + [(0.0, [])] * (problem.ranks - len(some)))
    while len(blocks) > 1:
        first, second = sorted(blocks, key=lambda block: block[-1][0] - block[0][0])[:2]
        joined = [(a + b, own + other) for (a, own), (b, other) in zip(first, reversed(second))]
        place = next(i for i, block in enumerate(blocks) if block is first)
        blocks[place] = sorted(joined, key=lambda one: -one[0])
        blocks = [block for block in blocks if block is not second]
    rank_of = [-1] * len(order)
    for rank, (_, samples) in enumerate(blocks[0] if blocks else []):
        for sample in samples:
            rank_of[sample] = rank
    return rank_of


@settings(deadline=None, max_examples=100)
@given(problems())
@example(TIES)
@example(problem_of(np.arange(100) % 30, 3))
def test_equal_counts_by_definition(problem):
    assert greedy_equal(problem).tolist() == deal_rounds(problem)
    assert karmarkar_karp(problem).tolist() == difference_blocks(problem)


def trade_one(problem, rank_of):
    """The best trade between the fullest and the emptiest rank, by trying all; None: none helps."""
    loads = np.bincount(rank_of, problem.costs, problem.ranks)
    full, empty = loads.argmax(), loads.argmin()
    best, least = None, loads[full] - loads[empty]
    for give in np.flatnonzero(rank_of == full):
        for take in [*np.flatnonzero(rank_of == empty), None]:
            traded = rank_of.copy()
            traded[give] = empty
            if take is not None:
                traded[take] = full
            after = np.bincount(traded, problem.costs, problem.ranks)
            held = np.bincount(traded, problem.tokens, problem.ranks)[[full, empty]].max()
            gap = abs(after[full] - after[empty])
            if gap < least and (problem.cap is None or held <= problem.cap):
                best, least = traded, gap
    return best


@settings(deadline=None, max_examples=100)
@given(problems(), st.sampled_from([None, 1.0, 1.2]), st.sampled_from([0.0, 1.1, 1.5]))
def test_trades_are_the_best_of_all(problem, slack, above):
    # whole numbers: sums are exact
    problem = replace(problem, costs=np.floor(10 * problem.costs))
    held = np.bincount(problem.home, problem.tokens, problem.ranks).max()
    problem = replace(problem, cap=None if slack is None else int(held * slack))
    goal = above * problem.costs.sum() / problem.ranks
    rank_of, expected = problem.home.copy(), problem.home
    trade_samples(problem, rank_of, goal)
    for _ in range(4 * problem.ranks):
        better = trade_one(problem, expected)
        if np.bincount(expected, problem.costs, problem.ranks).max() <= goal or better is None:
            break
        expected = better
    assert rank_of.tolist() == expected.tolist()


def move_few(problem):
    """`local` by its definition, one sample at a time; trades follow."""
    costs, tokens, rank_of = problem.costs, problem.tokens, problem.home.copy()
    loads, held = (np.bincount(rank_of, each, problem.ranks) for each in (costs, tokens))
    nodes = np.zeros(problem.ranks) if problem.nodes is None else problem.nodes
    cap = np.inf if problem.cap is None else problem.cap
    goal = 1.004 * max(loads.mean(), costs.max())
    given = []
    for rank in range(problem.ranks):
        kept, excess, surplus = [], loads[rank] - goal, held[rank] - cap
        if excess <= 0 and surplus <= 0:
            continue
        mine = np.flatnonzero(problem.home == rank)
        for sample in mine[sort_descending(costs[mine])]:
            if surplus > 0 or 0 < costs[sample] <= excess:
                given.append(sample)
                excess, surplus = excess - costs[sample], surplus - tokens[sample]
            else:
                kept.append(sample)
        if excess > 0:
            given.append(min(reversed(kept), key=lambda one: (costs[one] < excess, costs[one])))
    for sample in given:
        loads[problem.home[sample]] -= costs[sample]
        held[problem.home[sample]] -= tokens[sample]
    for sample in sorted(given, key=lambda one: (-costs[one], one)):
        roomy = [r for r in range(problem.ranks) if held[r] + tokens[sample] <= cap]
        near = np.flatnonzero(nodes == nodes[problem.home[sample]])
        rank = min(near, key=lambda rank: loads[rank])
        if rank not in roomy or loads[rank] + costs[sample] > goal:
            if not roomy:
                raise ValueError(f"sample {sample} .* fits on no rank")
            rank = min(roomy, key=lambda rank: loads[rank])
        rank_of[sample] = rank
        loads[rank] += costs[sample]
        held[rank] += tokens[sample]
    trade_samples(problem, rank_of, goal)
    return rank_of.tolist()


@settings(deadline=None, max_examples=150)
@given(problems(), st.sampled_from([None, 1.0, 1.2, 2.0]))
def test_local_by_definition(problem, slack):
    if not len(problem.costs):
        return
    if slack is not None:
        problem = replace(problem, cap=int(smallest_cap(problem) * slack))
    try:
        expected = move_few(problem)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error)):
            local(problem)
        return
    assert local(problem).tolist() == expected


def test_trades_stop_just_above_the_bound():
    """By default 0.05 % above it. The bound is the mean of all ranks here, then one sample."""

    def count_trades(ranks, goal=None):
        home = np.repeat(np.arange(len(ranks)), [len(costs) for costs in ranks])
        costs = np.array(sum(ranks, []), np.float64)
        problem = Problem(costs, np.ones(len(costs), np.int64), home, len(ranks))
        rank_of = home.copy()
        trade_samples(problem, rank_of, goal)
        return int((rank_of != home).sum())

    near, far = ([[5000] + [1] * number, [5000]] for number in (2, 6))
    assert count_trades(near) == 0 and count_trades(near, 5001.0) == 1
    assert count_trades(far) > 0 and count_trades(far, 5006.0) == 0
    assert count_trades([[10_000, 2], [1], [1]]) == 0


def test_trades_count_the_tokens_of_earlier_ones():
    """Each gives a sample of one token to rank 1, which has room for two."""
    costs, tokens = np.array([1.0] * 6 + [0.0]), np.array([1] * 6 + [4])
    problem = Problem(costs, tokens, np.array([0] * 6 + [1]), ranks=2, cap=6)
    rank_of = problem.home.copy()
    trade_samples(problem, rank_of)
    assert np.bincount(rank_of, tokens).tolist() == [4, 6]


def test_greedy_trades_what_longest_first_leaves_uneven():
    """3, 3, 2, 2, 2: longest first ends with 7 : 5, a swap of 3 and 2 makes it 6 : 6."""
    costs = np.array([3.0, 3.0, 2.0, 2.0, 2.0])
    problem = Problem(costs, np.ones(5, np.int64), np.zeros(5, np.int64), 2)
    assert assign(problem, greedy).loads.tolist() == [6, 6]


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0, 1e6]), max_size=40), st.integers(1, 7))
def test_fixed_on_a_device_is_fixed(costs, ranks):
    """Ties included."""
    n = len(costs)
    problem = Problem(
        np.array(costs, np.float64), np.ones(n, np.int64), np.zeros(n, np.int64), ranks
    )
    assert (FixedOnDevice(torch.device("cpu"))(problem) == fixed(problem)).all()


@settings(deadline=None, max_examples=60)
@given(problems())
def test_variable_cuts_sorted_samples_where_the_weights_are_equal(problem):
    """A sample belongs to the segment that contains its middle."""
    weight, total, expected = 0, int(problem.tokens.sum()), np.empty(len(problem.tokens), np.int64)
    for sample in sort_descending(problem.tokens):
        middle = weight + problem.tokens[sample] / 2
        cuts = [cut / problem.ranks * total for cut in range(1, problem.ranks)]
        expected[sample] = sum(cut <= middle for cut in cuts)
        weight += problem.tokens[sample]
    # sums of whole numbers are exact
    assert Variable(alpha=1.0)(problem).tolist() == expected.tolist()


def test_variable_weighs_and_tunes():
    """4^1.5 = 8: two samples of 4 tokens weigh as much as sixteen of one."""
    tuner, problem = Variable(), problem_of([4] * 2 + [1] * 16, 2)
    assert tuner(problem).tolist() == [0] * 2 + [1] * 16
    tuner(replace(problem, times=np.array([1.0, 3.0])))  # half the mean less, half the mean more
    assert tuner.shares.tolist() == [1.125, 0.875]
    far = Variable()
    far(replace(problem_of([1], 4, home=[0]), times=np.array([1.0, 1.0, 1.0, 9.0])))
    moved = np.array([7 / 6, 7 / 6, 7 / 6, 0.75])  # no further than by the gain at once
    assert far.shares == pytest.approx(moved / moved.mean())
    assert far(problem).tolist() == variable(problem).tolist(), "other ranks: shares are equal"


def test_variable_follows_the_measured_times():
    """A rank that is twice as slow ends with about half the work."""
    problem, tuner, speed = heavy(64, 4), Variable(), np.array([1.0, 1.0, 2.0, 1.0])
    measured = [None, None]  # a measurement is two batches old when it is used
    for _ in range(60):
        rank_of = tuner(replace(problem, times=measured.pop(0)))
        measured.append(np.bincount(rank_of, problem.costs, 4) * speed)
    spread = measured[-1].max() / measured[-1].mean()
    first = np.bincount(Variable()(problem), problem.costs, 4) * speed
    assert spread < 1.1 < first.max() / first.mean()
    again = Variable()
    again.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    assert (again(problem) == tuner(problem)).all()
    shares = tuner.shares.copy()
    tuner(replace(problem, times=np.array([1.0, 0.0, 1.0, 1.0])))  # one is not known
    assert (tuner.shares == shares).all()
    for bad in (-1.0, np.nan):
        with pytest.raises(ValueError, match="step times must be finite"):
            tuner(replace(problem, times=np.array([1.0, bad, 1.0, 1.0])))
    again.load_state_dict(json.loads(json.dumps(Variable().state_dict())))
    assert (again(problem) == variable(problem)).all(), "nothing was measured yet"


def test_figures_of_an_assignment():
    problem = Problem(
        np.array([3.0, 1.0, 2.0]), np.array([30, 10, 20]), np.array([0, 0, 1]), ranks=2
    )
    found = assign(problem, lambda _: np.zeros(3, np.int8))
    assert found.rank_of.dtype == np.int64
    assert found.loads.tolist() == [6, 0] and found.loads_before.tolist() == [4, 2]
    assert (found.imbalance, found.bound, found.above_bound) == (2.0, 3.0, 1.0)
    assert found.straggler_percent == 50 and found.moved_tokens == 20
    free = assign(replace(problem, costs=np.zeros(3)), stay)
    assert (free.imbalance, free.above_bound, free.straggler_percent) == (1.0, 0.0, 0.0)


def test_bad_functions_are_named():
    problem = problem_of([5, 6, 7], 2)

    def short(_):
        return np.zeros(2, np.int64)

    def far(_):
        return np.array([0, 2, 1])

    def below(_):
        return np.array([0, 1, -1])

    def halves(_):
        return np.array([0.5, 0, 1])

    with pytest.raises(ValueError, match="partitioner 'short' returned int64"):
        assign(problem, short)
    with pytest.raises(ValueError, match="partitioner 'far' gives sample 1 to rank 2 of 2"):
        assign(problem, far)
    with pytest.raises(ValueError, match="partitioner 'below' gives sample 2 to rank -1 of 2"):
        assign(problem, below)
    with pytest.raises(ValueError, match="partitioner 'halves' returned float64"):
        assign(problem, halves)
    with pytest.raises(
        ValueError, match=("partitioner 'stay' gives rank 0 12 tokens, over the cap of 11")
    ):
        assign(problem_of([5, 6, 7], 2, cap=11), stay)


def test_bad_problems_are_refused():
    lengths, home = np.array([1, 2]), np.array([0, 1])
    with pytest.raises(ValueError, match="sample 1 has cost nan"):
        Problem(np.array([1.0, np.nan]), lengths, home, 2)
    with pytest.raises(ValueError, match="sample 0 has cost -1.0"):
        Problem(np.array([-1.0, 1.0]), lengths, home, 2)
    with pytest.raises(ValueError, match="sample 1 has 2 tokens, over the cap of 1 per rank"):
        Problem(np.ones(2), lengths, home, 2, cap=1)
    with pytest.raises(ValueError, match="6 tokens do not fit on 2 ranks under a cap of 2"):
        Problem(np.ones(3), np.array([2, 2, 2]), np.array([0, 1, 0]), 2, cap=2)
    with pytest.raises(ValueError, match="sample 1 is at rank 2 of 2"):
        Problem(np.ones(2), lengths, np.array([0, 2]), 2)
    with pytest.raises(ValueError, match="sample 0 is at rank -1 of 2"):
        Problem(np.ones(2), lengths, np.array([-1, 0]), 2)
    for tokens, homes in ((lengths[:1], home), (lengths, home[:1])):
        with pytest.raises(ValueError, match="they must be equally many"):
            Problem(np.ones(2), tokens, homes, 2)
    with pytest.raises(ValueError, match="at least one rank"):
        Problem(np.ones(2), lengths, home, 0)


def test_names():
    assert find_partitioner("greedy") is find_partitioner("greedy", "cuda") is greedy
    assert find_partitioner("fixed") is fixed
    tuner = find_partitioner("variable")
    assert isinstance(tuner, Variable) and find_partitioner("variable") is not tuner
    assert find_partitioner("freescale.balance.partitioners.fixed:fixed") is fixed
    for name, message in (
        ("clever", "unknown partitioner 'clever'"),
        ("nowhere:f", "cannot be found"),
        ("math:pi", "is not a function"),
    ):
        with pytest.raises(ValueError, match=message):
            find_partitioner(name)
