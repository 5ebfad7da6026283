"""The check of the first batch: sums pass, means and samples that depend on each other do not, and
nothing is changed by it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from helpers.toys import Clicks, clicks_batch, rank_slice
from torch import nn

import freescale
from freescale import Pipeline
from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.models import HSTU, Ranking, Retrieval
from freescale.pipeline.first_batch import compare_halves, split_supervised
from freescale.transport.local import LocalTransport


class Pooled(nn.Module):
    """A dense model without tables' help: what it does with samples is up to `form`."""

    def __init__(self, form="sum", dropout=False, dtype=torch.float32) -> None:
        super().__init__()
        self.form, self.calls = form, 0
        self.item = nn.Embedding(50, 8, dtype=dtype)
        self.norm = nn.BatchNorm1d(8, dtype=dtype) if "norm" in form else nn.Identity()
        self.dropout = nn.Dropout(0.5) if dropout else nn.Identity()
        self.out = nn.Linear(8, 1, dtype=dtype)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch):
        self.calls += 1
        self.seen += 1
        random.random(), np.random.rand(), torch.rand(1)
        x = self.dropout(self.norm(self.item(batch.dense["item"])))
        losses = nn.functional.softplus(self.out(x).squeeze(1)) * batch.weights["click"]
        if self.form == "mean":
            return {"click": losses.sum() / batch.weights["click"].sum()}
        if self.form == "mean of samples":
            return {"click": losses.mean()}
        if self.form == "negatives":
            return {"click": torch.logsumexp(x @ x.T, 1).sum()}
        return {"click": losses.sum()}


def batch_of(samples=8, weights=None):
    return SequenceBatch(
        sequences={"history": Jagged(torch.arange(samples), torch.ones(samples).long())},
        dense={"item": torch.arange(samples)},
        weights={"click": torch.ones(samples) if weights is None else torch.tensor(weights)},
    )


def pipeline_of(model, transport=None, **options):
    torch.manual_seed(0)
    sharded = freescale.parallelize(model, {"item": ["item"]}, transport=transport)
    return Pipeline(sharded, torch.optim.SGD(sharded.dense_parameters(), lr=0.1), **options)


@pytest.mark.parametrize("schedule", ["serial", "staged"])
@pytest.mark.parametrize(
    ("form", "dropout", "message"),
    [
        ("mean", False, r"'click': the loss looks like a mean over the batch .*return sums"),
        ("mean of samples", False, "looks like a mean over the batch"),
        ("mean", True, "looks like a mean over the batch"),
        ("norm", False, r"samples depend on each other \('norm' is a BatchNorm1d\)"),
        ("norm", True, "module 'norm' is a BatchNorm1d"),
        ("negatives", False, r"samples depend on each other \(batch norm, in-batch negatives"),
    ],
    ids=[
        "weighted mean",
        "mean of samples",
        "mean with dropout",
        "batch norm",
        "batch norm with dropout",
        "in-batch negatives",
    ],
)
def test_what_is_no_sum_over_samples_is_refused(form, dropout, message, schedule):
    pipeline = pipeline_of(Pooled(form, dropout), schedule=schedule)
    with pytest.raises(ValueError, match=message):
        list(pipeline.run([batch_of()]))
    unchecked = pipeline_of(Pooled(form, dropout), schedule=schedule, check=False)
    assert len(list(unchecked.run([batch_of()]))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("precision", "dropout"), [("fp32", False), ("fp32", True), ("bf16", False)]
)
def test_sums_pass(dtype, precision, dropout):
    model = Pooled(dropout=dropout, dtype=dtype)
    pipeline = pipeline_of(model, precision=precision)
    assert len(list(pipeline.run([batch_of()] * 2))) == 2


def test_a_frozen_batch_norm_passes():
    pipeline = pipeline_of(Pooled("norm", dropout=True))
    pipeline.model.module.norm.eval()
    list(pipeline.run([batch_of()]))
    assert pipeline.model.training and not pipeline.model.module.norm.training


def test_a_mean_does_not_hide_behind_samples_without_weight():
    weights = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="looks like a mean"):
        list(pipeline_of(Pooled("mean")).run([batch_of(weights=weights)]))


def test_the_first_batch_with_two_samples_is_checked_and_no_later_one():
    pipeline = pipeline_of(Pooled("mean"))
    with pytest.raises(ValueError, match="looks like a mean"):
        list(pipeline.run([batch_of(1), batch_of(1), batch_of(4)]))
    assert pipeline.steps == 2
    pipeline = pipeline_of(Pooled())
    results = pipeline.run([batch_of(4), batch_of(4)])
    next(results)
    pipeline.model.module.form = "mean"
    assert len(list(results)) == 1


def test_a_resumed_run_is_not_checked_again():
    pipeline = pipeline_of(Pooled("mean"))
    pipeline.load_state_dict({"steps": 3})
    assert [result.step for result in pipeline.run([batch_of()])] == [4]


@pytest.mark.parametrize("schedule", ["serial", "staged"])
def test_nothing_is_changed(schedule):
    def state(check):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        model = Pooled(dropout=True)
        pipeline = pipeline_of(model, schedule=schedule, check=check, accumulate=2)
        losses = [result.loss for result in pipeline.run([batch_of()] * 3)]
        ends = torch.rand(3).tolist(), random.random(), np.random.rand()
        values = [value.tolist() for value in model.state_dict().values()]
        rows = pipeline.model.tables.get_local_rows("item")[1].tolist()
        return losses, ends, values, rows, model.calls

    assert state(True) == state(False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["hstu", "ranking"])
def test_our_own_models_pass(model, precision):
    generator = torch.Generator().manual_seed(0)
    lengths, counts = torch.tensor([5, 9, 1, 12, 3, 12]), torch.tensor([3, 2, 0, 5, 1, 2])

    def integers(bound, *shape):
        return torch.randint(0, bound, shape, generator=generator)

    batch = SequenceBatch(
        sequences={
            "history": Jagged(integers(37, 42), lengths),
            "targets": Jagged(integers(37, 42), lengths),
            "timestamps": Jagged(torch.arange(42), lengths),
            "labels": Jagged(integers(2, 13, 2).float(), counts),
        },
        candidates={"candidates": Nested(integers(37, 13), torch.ones(13).long(), counts)},
        dense={"negatives": integers(37, 6, 7)},
        weights={"click": counts.float(), "like": counts.float()}
        if model == "ranking"
        else {"next_item": lengths.float()},
        keys=torch.arange(6),
    )
    sizes = {"width": 8, "layers": 1, "heads": 2, "max_length": 20, "dropout": 0.3}
    sizes |= {"position_bias": True, "time_bias": True}
    encoder = HSTU(**sizes)
    plain = (
        Ranking(encoder, num_items=37, tasks=("click", "like"))
        if model == "ranking"
        else Retrieval(encoder, num_items=37)
    )
    sharded = freescale.parallelize(plain, plain.features)
    dense = torch.optim.SGD(sharded.dense_parameters(), lr=0.1)
    assert list(Pipeline(sharded, dense, precision=precision).run([batch]))


def _on_ranks(transport, form):
    pipeline = pipeline_of(Pooled(form), transport)
    # rank 1 has one sample: it cannot see the mistake itself
    batch = batch_of(4 if transport.rank == 0 else 1)
    try:
        return [result.loss for result in pipeline.run([batch] * 2)]
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


def test_an_error_of_one_rank_reaches_all():
    (kind, mine), (other, theirs) = run_ranks(2, _on_ranks, "mean")
    assert (kind, other) == ("ValueError", "RemoteError")
    assert theirs == f"rank 0 stopped: ValueError: {mine}" and "looks like a mean" in mine
    first, second = run_ranks(2, _on_ranks, "sum")
    assert first == second and len(first) == 2


def test_halves_have_half_of_the_supervised_samples():
    first, second = split_supervised(batch_of(weights=[0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0]))
    assert (len(first), len(second)) == (5, 3)
    assert split_supervised(batch_of(weights=[0.0] * 7 + [1.0])) is None
    assert split_supervised(batch_of(1)) is None


def test_clicks_pass():
    model = freescale.parallelize(Clicks(), Clicks.ids, transport=LocalTransport())
    batch = rank_slice(clicks_batch(12, 0), 1, 2)
    with model.reading(batch) as batch:
        compare_halves(model.module, batch, split_supervised(batch))
