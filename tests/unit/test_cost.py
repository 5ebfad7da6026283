"""The cost model, frozen and adapted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from freescale.balance.cost import AdaptiveCost, CostModel, features

TRUTH = np.array([3e-9, 4e-6, 2e-5, 1e-4])  # seconds


def step(random, ranks=4, samples=16, noise=0.0):
    lengths = np.clip(np.exp(random.normal(6, 1, (ranks, samples))), 1, 5000)
    candidates = random.integers(0, 20, (ranks, samples))
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
        summed, seconds = step(random, samples=int(random.integers(8, 24)))
        cost.update(summed, seconds + 0.5)
    summed, seconds = step(random)
    assert cost.predict(summed) == pytest.approx(seconds + 0.5, rel=0.01)
    assert cost.model.coefficients[0] == pytest.approx(TRUTH[0], rel=0.1)


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
    with pytest.raises(ValueError, match="finite and not negative"):
        cost.update(np.ones((1, 4)), np.array([-1.0]))
    with pytest.raises(ValueError, match="forgetting must be"):
        AdaptiveCost(CostModel(1.0, 1.0), forgetting=0.0)
