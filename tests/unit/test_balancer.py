"""What a balancer plans, learns and keeps, and when samples stay where they are."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from freescale.balance.balancer import Balancer, make_balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.greedy import greedy
from freescale.balance.partitioners.lookup import stay
from freescale.balance.partitioners.variable import Variable
from freescale.balance.shuffle import list_homes, measure_samples
from freescale.batch import Jagged, Nested, SequenceBatch

LENGTHS = np.array([7, 4, 3, 1, 1, 2])
TABLE = np.stack([LENGTHS, np.zeros(6, np.int64), LENGTHS], axis=1)
HOME = np.array([0, 0, 0, 1, 1, 1])  # 14 events and 4: the best assignment has 9 and 9
COST = CostModel(0.0, 10.0)


class Recorded:
    """greedy, with a record of its problems."""

    def __init__(self):
        self.problems = []

    def __call__(self, problem):
        self.problems.append(problem)
        return greedy(problem)


def test_samples_stay_where_the_best_assignment_gains_too_little():
    kept = Balancer("greedy", COST, least_gain=51).keep(TABLE, HOME, 2)
    assert kept is not None and kept.moved_tokens == 0
    assert (kept.rank_of == HOME).all()
    assert kept.loads.tolist() == kept.loads_before.tolist() == [140, 40]
    assert kept.bound == 90
    assert Balancer("greedy", COST, least_gain=50).keep(TABLE, HOME, 2) is None
    even = np.array([0, 1, 1, 1, 1, 0])
    assert Balancer("greedy", COST).keep(TABLE, even, 2) is None, "by default they always move"


def test_a_sample_larger_than_the_mean_bounds_the_gain():
    """20 events and 2: no assignment relieves the rank of the 18 by more than 2 events."""
    table = np.array([[18, 0, 18], [2, 0, 2], [1, 0, 1], [1, 0, 1]])
    home = np.array([0, 0, 1, 1])
    kept = Balancer("greedy", COST, least_gain=21).keep(table, home, 2)
    assert kept is not None and kept.bound == 180
    assert Balancer("greedy", COST, least_gain=20).keep(table, home, 2) is None


def test_samples_move_for_a_cap_and_for_what_is_measured():
    assert Balancer("greedy", COST, cap=14, least_gain=51).keep(TABLE, HOME, 2) is not None
    assert Balancer("greedy", COST, cap=13, least_gain=51).keep(TABLE, HOME, 2) is None
    assert Balancer("greedy", COST, adapt=True, least_gain=51).keep(TABLE, HOME, 2) is None


def test_nothing_to_move():
    assert Balancer("greedy", COST, least_gain=51).keep(TABLE[:0], HOME[:0], 2) is None


def test_the_default_cap_is_the_mean_and_the_largest_sample():
    """Costs count candidates alone: uncapped, the seven cheap samples would share a rank. With
    39 tokens the cap is 20 + 5, five of them."""
    candidates, tokens = np.array([100] + [1] * 7), np.array([4] + [5] * 7)
    table = np.stack([np.zeros(8, np.int64), candidates, tokens], axis=1)
    home, cost = np.zeros(8, np.int64), CostModel(0.0, 0.0, candidate=1.0)
    for name in ("greedy", "local"):
        found = Balancer(name, cost).plan(1, table, home, 2)
        assert sorted(np.bincount(found.rank_of, tokens)) == [14, 25], name
    roomy = Balancer("greedy", cost, cap=35).plan(1, table, home, 2)
    assert np.bincount(roomy.rank_of, tokens).tolist() == [4, 35]
    own = Recorded()
    Balancer(own, cost).plan(1, table, home, 2)
    assert own.problems[0].cap is None, "a function of the user's keeps no cap unless it is given"


def test_the_default_cost_counts_events():
    table, home, own = np.array([[5, 1, 9], [4, 2, 6]]), np.array([0, 1]), Recorded()
    Balancer(own).plan(1, table, home, 2)
    assert own.problems[0].costs.tolist() == [5, 4] and own.problems[0].tokens.tolist() == [9, 6]


def test_an_empty_batch():
    assert len(Balancer("greedy").plan(1, TABLE[:0], HOME[:0], 2).rank_of) == 0


def test_costs_follow_measured_times_and_so_do_later_plans():
    """The start takes all time for quadratic; it is linear, and half a second for any step."""
    own, random = Recorded(), np.random.default_rng(0)
    balancer = Balancer(own, CostModel(1.0, 0.0), adapt=True)
    times = None
    for step in range(1, 40):
        lengths = random.integers(1, 100, 12)
        table = np.stack([lengths, np.zeros(12, np.int64), lengths], axis=1)
        plan = balancer.plan(step, table, np.arange(12) % 3, 3)
        assert own.problems[-1].times is times
        if step == 1:
            assert own.problems[0].costs.tolist() == (lengths**2).tolist()
        times = 0.5 + 0.01 * np.bincount(plan.rank_of, lengths, 3)
        balancer.learn(step, times)
    shares = own.problems[-1].costs / own.problems[-1].costs.sum()
    assert shares == pytest.approx(lengths / lengths.sum(), rel=0.02)
    assert balancer.error < 0.01
    balancer.plan(40, table, np.arange(12) % 3, 3)
    balancer.learn(40, 2 * times)
    assert balancer.errors == pytest.approx(np.full(3, 0.5), rel=0.05)


def test_prediction_errors():
    """Of ranks with samples and a measured time. A frozen cost has no unit: it is scaled to the
    measured total."""
    balancer = Balancer(stay, CostModel(0.0, 0.01))
    assert balancer.error is None
    table = np.array([[9, 0, 9], [5, 0, 5], [4, 0, 4]])
    balancer.plan(1, table, np.array([0, 0, 1]), 3)  # 14 : 4 : nothing
    balancer.learn(1, np.array([10.0, 8.0, 0.5]))
    assert balancer.errors == pytest.approx([0.4, 0.5]) and balancer.error == pytest.approx(0.45)
    balancer.learn(1, np.array([7.0, 0.0, 0.0]))
    assert balancer.errors == pytest.approx([0.0])
    balancer.plan(2, 0 * table, np.array([0, 0, 1]), 3)  # costs nothing
    for step, nothing_new in ((1, np.zeros(3)), (1, np.ones(2)), (2, np.ones(3))):
        balancer.learn(step, nothing_new)
        assert balancer.errors == pytest.approx([0.0])


def test_a_frozen_balancer_shows_no_times():
    own = Recorded()
    balancer = Balancer(own, COST)
    for step in (1, 2):
        balancer.plan(step, TABLE, HOME, 2)
        balancer.learn(step, np.ones(2))
    assert [problem.times for problem in own.problems] == [None, None]


def test_a_measurement_may_come_seven_steps_late():
    balancer = Balancer(stay, COST, adapt=True)
    for step in range(1, 9):
        balancer.plan(step, TABLE, HOME, 2)
    balancer.learn(0, np.ones(2))  # of a step that was not planned
    assert balancer.error is None
    balancer.learn(1, np.ones(2))
    assert balancer.error is not None and len(balancer.state_dict(0)["assignments"]) == 8
    balancer.plan(9, TABLE, HOME, 2)
    assert [*balancer.state_dict(0)["assignments"]] == [str(step) for step in range(2, 10)]


SAME = np.tile([5, 0, 5], (12, 1))  # twelve samples of 5 events
APART = np.arange(12) % 2


def resumed(state, ranks=2):
    balancer = Balancer(Variable(), COST, adapt=True)
    balancer.load_state_dict(state, ranks)
    return balancer


def test_a_checkpoint_keeps_what_was_learned_and_what_is_in_flight():
    balancer = Balancer(Variable(), COST, adapt=True)
    before = [balancer.plan(step, SAME, APART, 2).rank_of.tolist() for step in (1, 2, 3)]
    balancer.learn(1, np.array([1.0, 30.0]))
    again = balancer.plan(4, SAME, APART, 2).rank_of.tolist()
    assert again != before[2], "or the comparison below would prove nothing"
    state = json.loads(json.dumps(balancer.state_dict(applied=2)))
    assert [*state["assignments"]] == ["3", "4"]
    other = resumed(state)
    assert other.plan(3, SAME, APART, 2).rank_of.tolist() == before[2]
    assert other.plan(3, SAME, APART, 2).rank_of.tolist() == again, "a step is in flight once"
    assert other.adaptive.model == balancer.adaptive.model != COST
    assert other.partitioner.state_dict() == balancer.partitioner.state_dict()
    # a batch of another size, or another number of ranks: planned anew
    assert len(resumed(state).plan(3, SAME[:5], APART[:5], 2).rank_of) == 5
    assert resumed(state, 3).plan(3, SAME, APART, 2).rank_of.tolist() == again
    # another partitioner than before: it begins anew, the cost goes on
    greedily = Balancer("greedy", COST, adapt=True)
    greedily.load_state_dict(state, 2)
    assert greedily.adaptive.model == balancer.adaptive.model
    assert resumed(greedily.state_dict(applied=2)).partitioner.shares is None
    frozen = Balancer(Variable(), COST)
    frozen.plan(1, SAME, APART, 2)
    assert frozen.state_dict(0) == {}
    frozen.load_state_dict(state, 2)
    assert frozen.plan(3, SAME, APART, 2).rank_of.tolist() == before[0]
    assert resumed({}).adaptive.model == COST


def batch_of(**sequences):
    parts = {name: Jagged(values, torch.tensor([2, 0, 1])) for name, values in sequences.items()}
    counts, lengths = torch.tensor([1, 2, 0]), torch.tensor([3, 1, 4])
    candidates = {"candidates": Nested(torch.arange(8), lengths, counts)}
    return SequenceBatch(sequences=parts, candidates=candidates, keys=torch.arange(3))


def test_samples_are_measured_by_events_candidates_and_tokens():
    batch = batch_of(history=torch.arange(3), prices=torch.rand(3), pages=torch.arange(3))
    assert measure_samples(batch, "history").tolist() == [[2, 1, 5], [0, 2, 5], [1, 0, 1]]
    assert measure_samples(batch, None).tolist() == [[4, 1, 7], [0, 2, 5], [2, 0, 2]]
    assert measure_samples(batch, "clicks").tolist() == [[0, 1, 3], [0, 2, 5], [0, 0, 0]]
    assert list_homes([2, 0, 1]).tolist() == [0, 0, 2]


def test_a_cost_by_length_needs_its_feature():
    batch = batch_of(pages=torch.arange(3))
    for cost in (CostModel(1.0, 0.0), CostModel(0.0, 1.0)):
        with pytest.raises(ValueError, match="feature 'history', which the batch lacks.* pages:"):
            Balancer("greedy", cost).check(batch)
    by_candidates = CostModel(0.0, 0.0, candidate=1.0)
    with pytest.raises(ValueError, match="batch lacks"):  # it may learn that length matters
        Balancer("greedy", by_candidates, adapt=True).check(batch)
    Balancer("greedy", by_candidates).check(batch)
    Balancer("greedy", COST, feature="pages").check(batch)
    Balancer("greedy", COST, feature=None).check(batch)
    Balancer("greedy", COST).check(batch.slice(0, 0))


def test_what_a_pipeline_takes_for_balance():
    assert make_balancer(None) is None and make_balancer("none") is None
    balancer = Balancer("greedy")
    assert make_balancer(balancer) is balancer
    assert make_balancer("greedy").partitioner is greedy
    assert make_balancer(stay).partitioner is stay
    with pytest.raises(TypeError, match="partitioner is 3: give a name"):
        make_balancer(3)
