"""check_samples_independent: finds the module, says nothing about models that are right."""

from __future__ import annotations

import pytest
import torch
from helpers.toys import Clicks, clicks_batch
from torch import nn

import freescale


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def forward(self, x):
        return x - x.mean(0)


def build(extra: nn.Module) -> Clicks:
    model = Clicks()
    model.item = nn.Embedding(200, 8, dtype=torch.float64)
    model.action = nn.Embedding(5, 8, dtype=torch.float64)
    model.layers.insert(1, extra)
    return model


def test_independent_samples_pass_with_dropout_too():
    for extra in (nn.Identity(), nn.Dropout(0.5), nn.LayerNorm(16, dtype=torch.float64)):
        model = build(extra)
        before = torch.random.get_rng_state()
        freescale.check_samples_independent(model, clicks_batch(9, 0))
        assert model.training and torch.equal(before, torch.random.get_rng_state())
        sharded = freescale.parallelize(model, Clicks.ids)
        freescale.check_samples_independent(sharded, clicks_batch(9, 0))


@pytest.mark.parametrize("share", [False, True], ids=["plain", "sharded"])
def test_the_module_is_named(share):
    model = build(Centred())
    checked = freescale.parallelize(model, Clicks.ids) if share else model
    with pytest.raises(ValueError, match=r"depend on each other.*'layers.1' \(Centred\)"):
        freescale.check_samples_independent(checked, clicks_batch(9, 0))


def test_batch_norm_and_batches_without_a_pair_are_refused():
    with pytest.raises(ValueError, match=r"module 'layers.1' is a BatchNorm1d"):
        freescale.check_samples_independent(
            build(nn.BatchNorm1d(16, dtype=torch.float64)), clicks_batch(9, 0)
        )
    with pytest.raises(ValueError, match="has 1 supervised samples"):
        freescale.check_samples_independent(build(nn.Identity()), clicks_batch(1, 0))
