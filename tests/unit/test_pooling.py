"""Pooled features: nn.EmbeddingBag as a table against nn.EmbeddingBag itself, staged against
serial."""

from __future__ import annotations

import pytest
import torch
from helpers.pooled import BATCHES, Pooled, train
from torch import nn

import freescale
from freescale.embedding.readers import BagReader
from freescale.pipeline.staged import Staged


def train_plain(batches=BATCHES):
    torch.manual_seed(0)
    model = Pooled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)["loss"] / len(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("placement", ["sharded", "replicated"])
@pytest.mark.parametrize("schedule", ["staged", "serial"])
def test_trains_as_embedding_bag_does(placement, schedule):
    expected_losses, expected = train_plain()
    losses, actual = train(placement=placement, schedule=schedule)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    for name, value in expected.items():
        ours = actual[name.replace(".weight", "/rows") if "out" not in name else name]
        torch.testing.assert_close(ours, value, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("rows", [freescale.Adam(lr=0.1), freescale.RowWiseAdagrad(lr=0.1)])
def test_schedules_train_the_same_bits_in_micro_batches_too(rows):
    for accumulate in (1, 3):
        expected_losses, expected = train(rows=rows, schedule="serial", accumulate=accumulate)
        for schedule in ("staged", Staged):
            losses, state = train(rows=rows, schedule=schedule, accumulate=accumulate)
            assert losses == expected_losses
            assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


def test_reader_takes_what_embedding_bag_takes_and_refuses_what_it_refuses():
    sharded = freescale.parallelize(Pooled(), Pooled.ids)
    module, batch = sharded.module, BATCHES[0]
    assert isinstance(module.summed, BagReader) and "mode='mean'" in repr(module.averaged)
    with sharded.reading(batch):
        ids = batch.values("f0")
        with pytest.raises(ValueError, match=r"'summed' takes ids \[n\] with offsets"):
            module.summed(ids)
        with pytest.raises(ValueError, match="'averaged' pools by 'mean'"):
            module.averaged(ids, torch.tensor([0, 1]), torch.ones(ids.numel()))
        with pytest.raises(ValueError, match="got per_sample_weights"):
            module.summed(ids, torch.tensor([0]), torch.ones(1))
        with pytest.raises(RuntimeError, match="has no whole weight"):
            _ = module.summed.weight


@pytest.mark.parametrize(
    ("bag", "message"),
    [
        (nn.EmbeddingBag(10, 4, mode="max"), "mode 'max' is not supported, sum and mean are"),
        (type("Mine", (nn.EmbeddingBag,), {})(10, 4), "Mine is a subclass of nn.EmbeddingBag"),
        (nn.EmbeddingBag(10, 4, max_norm=1.0), "max_norm is not supported"),
    ],
    ids=["max", "subclass", "max_norm"],
)
def test_refused_by_name(bag, message):
    with pytest.raises(ValueError, match=message):
        freescale.parallelize(nn.ModuleDict({"first": bag}), {"first": ["f0"]})
