"""Metrics and learning-rate schedules against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from freescale.config.metrics import (
    choose_metric,
    is_better,
    list_metrics,
    select_headlines,
)
from freescale.train.evaluate import (
    MISS,
    area_under_curve,
    group_area_under_curve,
    normalized_entropy,
    ranking_quality,
)
from freescale.train.learning_rate import build_learning_rate


def test_ranking_quality():
    quality = ranking_quality(torch.tensor([1, 2, 11, 50, 51]))
    hits = {1: 1, 5: 2, 10: 2, 20: 3, 50: 4, 100: 5, 200: 5}
    assert {k: quality[f"hr@{k}"] for k in hits} == pytest.approx(
        {k: n / 5 for k, n in hits.items()}
    )
    gains = [1, 1 / math.log2(3), 1 / math.log2(12)]
    assert quality["ndcg@10"] == pytest.approx(sum(gains[:2]) / 5, rel=1e-14)
    assert quality["ndcg@20"] == pytest.approx(sum(gains) / 5, rel=1e-14)
    assert quality["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 11 + 1 / 50 + 1 / 51) / 5, rel=1e-14)
    assert ranking_quality(torch.zeros(0)) == {}


def test_a_miss_counts_as_a_target_and_adds_nothing():
    missed, found = ranking_quality(torch.tensor([1, MISS, 3, MISS])), torch.tensor([1, 3])
    assert missed == pytest.approx({k: v / 2 for k, v in ranking_quality(found).items()})
    assert set(ranking_quality(torch.tensor([MISS])).values()) == {0.0}


def test_area_under_curve_counts_pairs():
    torch.manual_seed(0)
    predictions = torch.randint(0, 5, (60,)).double() / 5  # many ties
    labels = (torch.rand(60) < 0.4).double()
    pairs = [(p, n) for p in predictions[labels == 1] for n in predictions[labels == 0]]
    expected = sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)
    assert area_under_curve(predictions, labels) == pytest.approx(expected)
    assert math.isnan(area_under_curve(predictions, torch.zeros(60)))
    # not the best of all
    assert math.isnan(area_under_curve(torch.where(labels == 1, math.nan, predictions), labels))


def test_gauc_is_the_weighted_mean_over_users_with_both_classes():
    torch.manual_seed(0)
    counts = torch.tensor([4, 0, 1, 7, 3, 40, 2])
    total = int(counts.sum())
    predictions = torch.randint(0, 6, (total,)).float() / 5  # ties, also between users
    labels = (torch.rand(total) < 0.5).float()
    labels[12:15] = 1  # a user of one class
    users = list(zip(predictions.split(counts.tolist()), labels.split(counts.tolist())))
    areas = [(area_under_curve(p, y), len(y)) for p, y in users]
    counted = [(area, size) for area, size in areas if not math.isnan(area)]
    assert 1 < len(counted) < 6
    expected = sum(area * size for area, size in counted) / sum(size for _, size in counted)
    assert group_area_under_curve(predictions, labels, counts) == pytest.approx(expected)
    assert math.isnan(group_area_under_curve(predictions, torch.ones(total), counts))
    predictions[5] = math.nan
    assert math.isnan(group_area_under_curve(predictions, labels, counts))
    nobody = torch.zeros(0)
    assert math.isnan(group_area_under_curve(nobody, nobody, nobody.long()))


def test_names():
    names = list_metrics("retrieval")
    quality = ranking_quality(torch.tensor([1]))
    assert set(names) == {*quality, *(f"{name}/unseen" for name in quality), "repeats"}
    headlines = ["hr@10", "ndcg@10", "hr@10/unseen", "ndcg@10/unseen"]
    assert select_headlines(names) == headlines and choose_metric("retrieval") in names
    judged = list_metrics("ranking", ["click", "like"])
    assert choose_metric("ranking", ["click", "like"]) == judged[0] == "ne/click"
    assert select_headlines(judged) == judged and "gauc/like" in judged
    assert (
        is_better("mrr", 0.2, 0.1) and is_better("ne/click", 0.8, 0.9) and is_better("mrr", 0, None)
    )
    assert not any(
        is_better(m, v, 0.5) for m, v in (("mrr", 0.5), ("ne/click", 0.6), ("mrr", math.nan))
    )
    assert not is_better("mrr", math.nan, None)


def test_normalized_entropy():
    labels, guesses = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.75, 0.125, 0.5])
    entropies = [  # of the guesses, and of guessing the mean label
        -sum(math.log(chance) for chance in chances) / 3
        for chances in ([0.75, 0.875, 0.5], [1 / 3, 2 / 3, 2 / 3])
    ]
    expected = entropies[0] / entropies[1]
    assert normalized_entropy(guesses, labels) == pytest.approx(expected, rel=1e-14)
    for constant in (0.0, 1.0):
        certain = torch.full((3,), constant)  # and wrong: bad, but a number
        assert 1 < normalized_entropy(certain, labels) < math.inf
        assert math.isnan(normalized_entropy(guesses, certain)), "nothing to predict"


def test_learning_rate():
    constant = build_learning_rate(4, "constant", 100)
    assert [constant(s) for s in (1, 2, 4, 5, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    linear = build_learning_rate(0, "linear", 10)
    assert linear(5) == pytest.approx(0.5) and linear(10) == 0 and linear(12) == 0
    cosine = build_learning_rate(2, "cosine", 12)
    assert cosine(7) == pytest.approx(0.5) and cosine(12) == pytest.approx(0.0)
    trapezoid = build_learning_rate(0, "trapezoid", 10)
    assert [trapezoid(step) for step in (1, 7, 10)] == [1.0, pytest.approx(1.0), 0.0]
    assert trapezoid(9) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="decay must be one of constant, linear, cosine"):
        build_learning_rate(0, "steps", 10)
