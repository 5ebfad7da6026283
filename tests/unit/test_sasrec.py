"""SASRec against a dense, padded computation in plain torch, and what its settings refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.model_cases import (
    ACTIONS,
    ITEMS,
    TASKS,
    WIDTH,
    assert_equal,
    batch_of,
    losses_and_gradients,
)
from torch.nn import functional as F

from freescale.balance.cost import CostModel
from freescale.config import DataConfig, ModelConfig, RunConfig
from freescale.kernels.attention import softmax as softmax_attention
from freescale.models import Ranking, Retrieval, SASRec
from freescale.random import derive, draw_keep_mask
from freescale.train.build import build_balancer, build_encoder
from freescale.visible import Visible


def encoder(**changes):
    options = {"heads": 2, "hidden": 5, "dropout": 0.3}
    return SASRec(width=WIDTH, layers=2, max_length=12, **(options | changes))


def model_of(kind, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    tables = {"num_items": ITEMS, "num_actions": ACTIONS}
    model = (
        Retrieval(encoder(**changes), **tables, temperature=0.3)
        if kind == "retrieval"
        else Ranking(encoder(**changes), **tables, tasks=TASKS)
    )
    return model.to(dtype).train()


def compute_densely(model, x, history, key, keep):
    """One sample, padded by nothing, with a full matrix of scores: x [tokens, width]."""
    tokens, width = x.shape
    slots = torch.arange(tokens)
    other, past = slots[None] != slots[:, None], slots[None] < history
    sees = (slots[None] <= slots[:, None]) & (past | ~other)
    if model.visible is not None:
        apart = slots.clamp(max=history)[:, None] - slots.clamp(max=history)[None]
        sees &= (apart < model.visible.last) | (slots[None] < model.visible.first)
    keys = derive(key, slots)

    def drop(values, stream, *more):
        if keep == 1:
            return values
        return values * draw_keep_mask(derive(keys, stream, *more), values.shape[1], keep) / keep

    x = drop(x * width**0.5 + model.position[slots.clamp(max=history)], 1 << 20)
    for number, layer in enumerate(model.layers):
        q_in = F.layer_norm(x, (width,), eps=1e-8)
        q = layer.query(q_in).view(tokens, model.heads, width // model.heads)
        k, v = (part.view_as(q) for part in layer.key_value(x).split(width, 1))
        out = []
        for head in range(model.heads):
            scores = q[:, head] @ k[:, head].T / q.shape[2] ** 0.5
            weights = scores.masked_fill(~sees, -torch.inf).softmax(1)
            out.append(drop(weights, 3 * number, head) @ v[:, head])
        y = F.layer_norm(q_in + layer.output(torch.cat(out, 1)), (width,), eps=1e-8)
        inside = drop(layer.hidden(y).relu(), 3 * number + 1)
        x = y + drop(layer.result(inside), 3 * number + 2)
    return x


@pytest.mark.parametrize("visible", [None, Visible(2, 3)])
@pytest.mark.parametrize("budget", [1 << 20, 40], ids=["one tile", "tiles of a row"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_equals_a_dense_computation(dropout, budget, visible, monkeypatch):
    monkeypatch.setattr(softmax_attention, "TILE_BUDGET", budget)
    torch.manual_seed(1)
    model = encoder(dropout=dropout, visible=visible).double().train()
    history, counts = [5, 0, 1, 12, 3, 0], [3, 2, 0, 4, 1, 0]
    lengths = [a + b for a, b in zip(history, counts, strict=True)]
    x = torch.randn(sum(lengths), WIDTH, dtype=torch.float64, requires_grad=True)
    slope = torch.randn_like(x)
    keys = torch.arange(len(lengths)) * 7919
    own = list(model.parameters())
    out = model(x, torch.tensor(lengths), keys, candidate_counts=torch.tensor(counts))
    found = [out, *torch.autograd.grad(out, [x, *own], slope)]
    dense = torch.cat(
        [
            compute_densely(model, part, past, keys[number], 1 - dropout)
            for number, (part, past) in enumerate(zip(x.split(lengths), history, strict=True))
        ]
    )
    expected = [dense, *torch.autograd.grad(dense, [x, *own], slope)]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", ["retrieval", "ranking"])
class TestNeighbours:
    def test_a_batch_is_the_sum_of_its_samples(self, kind):
        model, batch = model_of(kind), batch_of()
        singles = [losses_and_gradients(model, batch.slice(i, i + 1)) for i in range(len(batch))]
        expected = {name: sum(s[name] for s in singles) for name in singles[0]}
        # nothing is left out of the comparison
        assert all(value.abs().max() > 0 for value in expected.values())
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
        assert_equal(losses_and_gradients(model, batch.select(order)), expected, 1e-11)

    def test_checkpointing_gives_the_same_bits(self, kind):
        plain, saving = model_of(kind), model_of(kind, checkpoint=True)
        plain, saving = (losses_and_gradients(m, batch_of()) for m in (plain, saving))
        assert all(torch.equal(plain[n], saving[n]) for n in plain)

    def test_nothing_to_do(self, kind):
        for lengths, counts in (([], []), ([0], [0]), ([0, 0], [2, 0]), ([0, 3], [0, 0])):
            found = losses_and_gradients(model_of(kind), batch_of(lengths, counts))
            assert all(torch.isfinite(value).all() for value in found.values())

    def test_lower_precision(self, kind):
        exact, batch = losses_and_gradients(model_of(kind), batch_of()), batch_of()
        for dtype in (torch.float32, torch.bfloat16):
            model = model_of(kind, torch.float32)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                found = losses_and_gradients(model, batch)
            for name in exact:
                error = (found[name].double() - exact[name]).norm() / exact[name].norm()
                assert error < (1e-4 if dtype == torch.float32 else 0.3), name


def test_mistakes():
    model, x = encoder(), torch.zeros(13, WIDTH)
    with pytest.raises(ValueError, match="max_length=12"):
        model(x, torch.tensor([13]), torch.tensor([0]))
    with pytest.raises(ValueError, match="dropout needs keys"):
        model(x, torch.tensor([6, 7]))
    with pytest.raises(ValueError, match="add up to 12"):
        model(x, torch.tensor([12]), torch.tensor([0]))
    with pytest.raises(ValueError, match="multiple of heads=3"):
        encoder(heads=3)
    with pytest.raises(ValueError, match="hidden must be at least 1"):
        encoder(hidden=0)


def test_settings():
    chosen = ModelConfig(encoder="sasrec")
    assert not chosen.time_bias and not chosen.position_bias
    assert ModelConfig().time_bias and ModelConfig().position_bias
    assert not ModelConfig(time_bias=False).time_bias
    for name, flag in (("time_bias", "--time-bias"), ("position_bias", "--position-bias")):
        with pytest.raises(ValueError, match=f"sasrec has no {flag}"):
            ModelConfig(encoder="sasrec", **{name: True})
    with pytest.raises(ValueError, match="hstu has no --hidden"):
        ModelConfig(hidden=8)


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_a_run_builds_what_is_visible(kind):
    config = RunConfig(
        DataConfig(data="x", max_length=50),
        ModelConfig(encoder=kind, width=8, heads=2, attend="first=4, last=9"),
    )
    assert build_encoder(config).visible == Visible(4, 9)
    balancer = build_balancer(config, torch.device("cpu"), prefix=2)
    assert balancer is not None and balancer.cost.visible == Visible(4, 9)
    whole = RunConfig(config.data, replace(config.model, attend="last=51"))
    assert build_encoder(whole).visible is None  # candidates stand behind 50 events
    for wrong in ("first=64", "last=0", "first=-1,last=4", "last=4,next=3", "64,1024"):
        with pytest.raises(ValueError, match="first="):
            ModelConfig(attend=wrong)
    with pytest.raises(ValueError, match="without --attend"):
        ModelConfig(head="dlrm", task="ranking", labels="like", attend="last=4")


def test_a_run_builds_it_and_balances_by_its_costs():
    model = ModelConfig(encoder="sasrec", width=8, layers=3, heads=2, hidden=16)
    config = RunConfig(DataConfig(data="x", negatives=5), model)
    built = build_encoder(config)
    assert isinstance(built, SASRec) and len(built.layers) == 3 and built.capturable
    assert built.layers[0].hidden.out_features == 16
    balancer = build_balancer(config, torch.device("cpu"))
    expected = CostModel.of_sasrec(width=8, layers=3, hidden=16, negatives=5)
    assert balancer is not None and balancer.cost == expected
    # forward and backward, 2 operations each: scores and sums of half of the pairs; projections
    pairs, event = 3 * 3 * 2 * 8, 3 * (3 * 2 * 8 * (4 * 8 + 2 * 16) + 2 * 5 * 8)
    assert expected.coefficients == (pairs, event, event - 3 * 2 * 5 * 8, 0)
