"""Metrics and learning-rate schedules against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from freescale.train.learning_rate import build_learning_rate
from freescale.train.metrics import area_under_curve, normalized_entropy, ranking_quality


def test_ranking_quality():
    quality = ranking_quality(torch.tensor([1, 2, 11, 50, 51]))
    assert quality["hr@1"] == pytest.approx(1 / 5)
    assert quality["hr@10"] == pytest.approx(2 / 5)
    assert quality["hr@50"] == pytest.approx(4 / 5)
    assert quality["ndcg@10"] == pytest.approx((1 + 1 / math.log2(3)) / 5)
    assert quality["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 11 + 1 / 50 + 1 / 51) / 5)


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


def test_normalized_entropy():
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert normalized_entropy(torch.full((4,), 0.25), labels) == pytest.approx(1.0)
    assert normalized_entropy(torch.tensor([0.9, 0.1, 0.1, 0.1]), labels) < 0.5
    assert math.isnan(normalized_entropy(torch.full((4,), 0.25), torch.zeros(4)))


def test_learning_rate():
    constant = build_learning_rate(4, "constant", 100)
    assert [constant(s) for s in (1, 2, 4, 5, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    linear = build_learning_rate(0, "linear", 10)
    assert linear(5) == pytest.approx(0.5) and linear(10) == 0 and linear(12) == 0
    cosine = build_learning_rate(2, "cosine", 12)
    assert cosine(7) == pytest.approx(0.5) and cosine(12) == pytest.approx(0.0)
    with pytest.raises(ValueError, match="decay must be constant, linear or cosine"):
        build_learning_rate(0, "steps", 10)
