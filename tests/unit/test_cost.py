"""The cost model, frozen and adapted."""

from __future__ import annotations

import json

import numpy as np
import pytest
from torch import nn

from freescale.balance.cost import AdaptiveCost, CostModel, features
from freescale.models.hstu import HSTU
from freescale.models.sasrec import SASRec
from freescale.visible import Visible

TRUTH = np.array([3e-9, 4e-6, 2e-5, 1e-4])  # seconds


def step(random, ranks=4, samples=16, noise=0.0, candidates=20):
    lengths = np.clip(np.exp(random.normal(6, 1, (ranks, samples))), 1, 5000)
    candidates = random.integers(0, candidates, (ranks, samples))
    summed = np.stack(
        [features(ls, cs).sum(axis=0) for ls, cs in zip(lengths, candidates, strict=True)]
    )
    return summed, summed @ TRUTH * (1 + noise * random.normal(size=ranks))


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_learns_the_truth_from_a_wrong_start(noise):
    random = np.random.default_rng(0)
    cost = AdaptiveCost(CostModel(1.0, 1.0, 0.0, 0.0))
    for _ in range(50):
        cost.update(*step(random, noise=noise))
    summed, seconds = step(random)
    assert cost.predict(summed) == pytest.approx(seconds, rel=1e-3 if noise == 0 else 0.05)
    if noise == 0:
        # Candidates and the constant are small parts of these times and hardly told apart; the
        # others are.
        assert cost.model.coefficients[:2] == pytest.approx(TRUTH[:2].tolist(), rel=0.05)


@pytest.mark.parametrize("visible", [Visible(3, 5), Visible(0, 1), Visible(7, 40)])
def test_counts_what_is_visible(visible):
    lengths, candidates = np.arange(30), np.arange(30)[::-1] % 4
    place = np.arange(31)
    sees = ~visible.hides(place[:, None] - place, place) & (place <= place[:, None])
    pairs = [sees[:n, :n].sum() + c * sees[n, : n + 1].sum() for n, c in zip(lengths, candidates)]
    assert visible.count_pairs(lengths, candidates).tolist() == pairs
    cost = CostModel(2.0, 3.0, visible=visible)
    events = np.array([sees[:n, :n].sum() for n in lengths])
    assert cost(lengths).tolist() == (4.0 * events + 3 * lengths).tolist()
    assert cost.with_prefix(4).visible == visible


def test_follows_a_change():
    random = np.random.default_rng(1)
    cost = AdaptiveCost(CostModel(1.0, 1.0))
    for number in range(200):
        summed, seconds = step(random)
        cost.update(summed, seconds * (1 if number < 100 else 3))
    summed, seconds = step(random)
    assert cost.predict(summed) == pytest.approx(3 * seconds, rel=0.02)


def test_a_constant_of_the_step_is_predicted_but_is_no_cost_of_a_sample():
    random = np.random.default_rng(3)
    cost = AdaptiveCost(CostModel(1.0, 1.0))
    for _ in range(100):
        summed, seconds = step(random, samples=int(random.integers(8, 24)), candidates=1)
        cost.update(summed, seconds + 0.5)
    summed, seconds = step(random, samples=1, candidates=1)
    assert cost.predict(summed) == pytest.approx(seconds + 0.5, rel=0.01)
    assert cost.predict(np.zeros((1, 4))) == 0, "a rank without samples computes nothing"
    assert cost.model.coefficients[0] == pytest.approx(TRUTH[0], rel=0.1)


def test_begins_with_the_proportions_of_the_start():
    """One measurement cannot tell the terms apart: if it agrees with the start, so does all that
    is learned from it."""
    start = CostModel(3e-3, 5.0, 70.0, 900.0)
    cost, summed = AdaptiveCost(start), step(np.random.default_rng(4))[0]
    cost.update(summed, 1e-6 * (summed @ np.array(start.coefficients)))
    expected = [1e-6 * each for each in start.coefficients]
    assert cost.model.coefficients == pytest.approx(expected, rel=1e-9)


def test_terms_that_were_never_measured_stay():
    """Without candidates; and for so long that nothing is left of the first measurement."""
    cost, random = AdaptiveCost(CostModel(1.0, 1.0, 5.0), forgetting=0.5), np.random.default_rng(5)
    cost.update(*step(random, candidates=1))
    first = cost.model.candidate
    for _ in range(1200):
        cost.update(*step(random, candidates=1))
    assert first > 0 and cost.model.candidate == pytest.approx(first)


def test_ranks_without_samples_or_time_say_nothing():
    random = np.random.default_rng(6)
    all_ranks, busy = AdaptiveCost(CostModel(1.0, 1.0)), AdaptiveCost(CostModel(1.0, 1.0))
    for _ in range(5):
        summed, seconds = step(random, samples=1, candidates=1)
        more, _ = step(random, ranks=1)
        busy.update(summed, seconds)
        all_ranks.update(
            np.concatenate([summed, more, np.zeros((1, 4))]), np.append(seconds, [0.0, 0.3])
        )
    assert all_ranks.state_dict() == busy.state_dict() and busy.calibrated


def test_costs_that_would_all_be_negative_are_noise():
    """The more a rank has, the less time it takes."""
    start = CostModel(1e-6, 1e-3, 0.0, 0.25)  # terms of equal weight here
    cost, times = AdaptiveCost(start), np.arange(1.0, 5.0)
    cost.update(np.outer(times, [1e6, 1e3, 0.0, 4.0]), 10 - 2 * times)
    assert cost.calibrated and cost.model == start


def test_the_same_inputs_give_the_same_bits_and_a_state_goes_on():
    first, second, random = (
        AdaptiveCost(CostModel(1.0, 1.0)),
        AdaptiveCost(CostModel(1.0, 1.0)),
        np.random.default_rng(2),
    )
    steps = [step(random, noise=0.1) for _ in range(20)]
    for number, inputs in enumerate(steps):
        first.update(*inputs)
        if number == 9:  # saved and loaded in the middle
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        if number > 9:
            second.update(*inputs)
    assert first.state_dict() == second.state_dict() and first.model == second.model


def test_before_and_without_measurements():
    cost = AdaptiveCost(CostModel(1.0, 2.0))
    assert cost.model == CostModel(1.0, 2.0)
    cost.update(np.zeros((2, 4)), np.zeros(2))  # no rank had a sample
    assert cost.model == CostModel(1.0, 2.0)
    for bad in (-1.0, np.nan):
        with pytest.raises(ValueError, match="finite and not negative"):
            cost.update(np.ones((2, 4)), np.array([1.0, bad]))
    again = AdaptiveCost(CostModel(1.0, 2.0))
    again.load_state_dict(json.loads(json.dumps(cost.state_dict())))
    assert not again.calibrated and again.model == CostModel(1.0, 2.0)
    for forgetting in (0.0, 1.5):
        with pytest.raises(ValueError, match="forgetting must be"):
            AdaptiveCost(CostModel(1.0, 1.0), forgetting)
    AdaptiveCost(CostModel(1.0, 1.0), forgetting=1.0)


def test_cost_of_a_sample():
    cost, lengths, candidates = CostModel(2.0, 3.0, 5.0, 7.0), np.array([10, 0]), np.array([1, 4])
    assert cost(lengths, candidates).tolist() == [200 + 30 + 5 + 7, 20 + 7]
    assert cost(lengths).tolist() == [200 + 30 + 7, 7]
    assert CostModel(1.0, 0.0)(np.array([100_000], np.int32)) == 1e10
    even = CostModel.balanced_at(50.0)
    assert even.quadratic * 50**2 == even.linear * 50 > 0
    for bad in ((0.0, 0.0), (1.0, -0.5), (1.0, np.inf)):
        with pytest.raises(ValueError, match="finite, not negative and not all zero"):
            CostModel(*bad)


@pytest.mark.parametrize("of", ["hstu", "wide hstu", "sasrec"])
def test_cost_of_an_encoder_is_its_operations(of):
    """A multiplication with a weight is two operations, three times with the backward. So are those
    of an event with the half of all events that it sees: scores, then a sum of values."""
    shape = {"width": 12, "layers": 2}
    if "hstu" in of:
        sizes = shape | {"heads": 3, "d_qk": 5, "d_v": 7, "wide": of == "wide hstu"}
        encoder, cost, seen = HSTU(**sizes, max_length=9), CostModel.of_hstu, 3 * (5 + 7)
    else:
        sizes = shape | {"hidden": 20}
        encoder, cost, seen = SASRec(**sizes, heads=2, max_length=9), CostModel.of_sasrec, 12 + 12
        assert cost(**shape) == cost(**shape, hidden=12)
    weights = sum(part.weight.numel() for part in encoder.modules() if isinstance(part, nn.Linear))
    found = cost(**sizes, negatives=10, tasks=4)
    assert found.quadratic == 3 * 2 * 2 * seen / 2
    assert found.linear == 3 * 2 * (weights + 10 * 12)
    assert found.candidate == 3 * 2 * (weights + 4 * 12)
    assert cost(**sizes) == CostModel(found.quadratic, 6.0 * weights, 6.0 * weights)
    if "hstu" in of:
        more = cost(**sizes, inputs=100)
        assert more == CostModel(found.quadratic, *(6.0 * (weights + 100),) * 2)
