"""The DLRM with HSTU, against its formulas token by token, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.dlrm_cases import (
    CONTEXT,
    CONTEXT_ROWS,
    MAX_LENGTH,
    PLACES,
    ROWS,
    TASKS,
    compute_logits,
    make_batch,
    make_model,
)
from torch.nn import functional as F

import freescale
from freescale.balance.cost import CostModel
from freescale.batch import Nested
from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from freescale.models import (
    HSTU,
    DlrmHSTU,
    DlrmRanking,
    FeatureTables,
    Retrieval,
    start_histories,
)
from freescale.recommend.portable import PaddedEncoder
from freescale.train.build import build_balancer, build_module
from freescale.train.build_balancer import count_extra_work
from freescale.transport.local import LocalTransport

CASES = {
    "one candidate": {},
    "several that share their context": {"counts": (2, 1, 3), "lengths": (7, 0, 4)},
    "more events than positions": {"lengths": (MAX_LENGTH - CONTEXT, 1, 0)},
}


def compute_losses(logits, batch):
    labels = batch.values("labels").to(logits.dtype)
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(0)
    return {task: loss for task, loss in zip(TASKS, losses, strict=True)}


@pytest.mark.parametrize("case", CASES)
def test_logits_losses_and_gradients(case):
    batch, model = make_batch(**CASES[case]), make_model()
    logits = compute_logits(model, batch)
    # phases are in float32, everything else in float64
    torch.testing.assert_close(model.predict(batch), logits.sigmoid(), rtol=0, atol=1e-7)
    expected, found = compute_losses(logits, batch), model(batch)
    named = dict(model.named_parameters())
    sums = [sum(losses.values()) for losses in (expected, found)]
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-7, atol=0)
    wanted, mine = (torch.autograd.grad(total, list(named.values())) for total in sums)
    for name, one, other in zip(named, wanted, mine, strict=True):
        assert one.abs().max() > 0, name
        torch.testing.assert_close(other, one, rtol=1e-6, atol=5e-7, msg=name)


def test_a_step_on_sharded_tables():
    batch, model = make_batch(), make_model()
    losses = compute_losses(compute_logits(model, batch), batch)
    total = sum(losses.values())
    (total / len(batch)).backward()
    sharded = freescale.parallelize(
        make_model(), model.features, freescale.SGD(lr=1.0), transport=LocalTransport(),
        row_clip=None,
    )  # fmt: skip
    dense = torch.optim.SGD(sharded.dense_parameters(), lr=0.0)
    (result,) = freescale.Pipeline(sharded, dense).run([batch])
    assert result.loss * len(batch) == pytest.approx(total.item(), rel=1e-7)
    for name in ("item", "item_features", "context_features"):
        ids, rows = sharded.tables.get_local_rows(name)
        table = model.get_parameter(f"{name}.weight")
        stepped = (table - table.grad)[ids]
        torch.testing.assert_close(rows, stepped.detach(), rtol=1e-6, atol=1e-8)


def test_dropout_depends_on_the_sample_alone():
    model = make_model(dropout=0.5).train()
    batch = make_batch()
    whole = model._compute_logits(batch)
    for sample in range(3):
        one = batch.select(torch.tensor([sample]))
        torch.testing.assert_close(
            model._compute_logits(one), whole[sample : sample + 1], rtol=1e-12, atol=0
        )
    assert not torch.allclose(whole, model.eval()._compute_logits(batch))


def test_a_sample_without_a_candidate():
    batch = make_batch(counts=(1, 0, 2))
    model = make_model()
    both = [model._compute_logits(each) for each in batch.split([1, 2])]
    torch.testing.assert_close(model._compute_logits(batch), torch.cat(both), rtol=1e-12, atol=0)
    assert model._compute_logits(batch.slice(1, 2)).shape == (0, len(TASKS))


def test_without_context_features_or_actions():
    encoder = DlrmHSTU(
        width=8, layers=1, heads=2, max_length=9, context=0, positions=9, time_buckets=5
    )
    model = DlrmRanking(encoder, num_items=30, tasks=TASKS, input_hidden=4, head_hidden=8)
    assert model.features == {"item": ["history", "candidates"]}
    losses = model.eval()(make_batch())
    assert sum(losses.values()).isfinite()


class TestRefusals:
    def test_candidates_that_differ_in_their_context(self):
        batch = make_batch(counts=(1, 3, 1))
        codes = batch.sequences["context_features"]
        other = codes.values.clone()
        other[2, 1] = (other[2, 1] + 1) % CONTEXT_ROWS
        changed = {**batch.sequences, "context_features": replace(codes, values=other)}
        with pytest.raises(ValueError, match="sample 1 differ in their context"):
            make_model()(replace(batch, sequences=changed))

    def test_a_candidate_of_two_items(self):
        batch = make_batch()
        pairs = Nested(torch.arange(4), torch.tensor([1, 2, 1]), torch.ones(3, dtype=torch.int64))
        with pytest.raises(ValueError, match="candidate 1 of the batch has 2"):
            make_model()(replace(batch, candidates={"candidates": pairs}))

    def test_features_that_it_does_not_read(self):
        for tables in (FeatureTables(ROWS, event=3), FeatureTables(ROWS, user=3)):
            with pytest.raises(ValueError, match="reads features of items and of requests"):
                make_model(tables=tables)
        with pytest.raises(ValueError, match="a table of 20 rows with 0 places"):
            make_model(tables=FeatureTables(ROWS, context=CONTEXT_ROWS, context_places=CONTEXT))
        with pytest.raises(ValueError, match="3 tokens of context, but requests have 2"):
            make_model(
                tables=FeatureTables(
                    ROWS, context=CONTEXT_ROWS, item_places=PLACES, context_places=2
                )
            )

    def test_sizes(self):
        options = {"width": 8, "layers": 1, "heads": 2, "max_length": 9}
        for wrong in ({"positions": 3}, {"time_buckets": 0}, {"context": -1}):
            sizes = {"context": 3, "positions": 9, "time_buckets": 5} | wrong
            with pytest.raises(ValueError, match="positions must be more"):
                DlrmHSTU(**options, **sizes)

    def test_an_encoder_without_times(self):
        encoder = make_model().encoder
        x, lengths = torch.zeros(4, 8).double(), torch.tensor([4])
        with pytest.raises(ValueError, match="needs timestamps"):
            encoder(x, lengths)
        too_long = torch.zeros(MAX_LENGTH + 1, 8).double()
        with pytest.raises(ValueError, match="max_length"):
            encoder(too_long, torch.tensor([MAX_LENGTH + 1]), None, torch.arange(MAX_LENGTH + 1))


class TestSettings:
    def configure(self, candidates=1, **model):
        options = {"task": "ranking", "labels": "like", "head": "dlrm", "width": 16} | model
        return RunConfig(
            DataConfig(data="x", candidates=candidates, max_length=20),
            ModelConfig(**options),
            TrainConfig(balance="greedy"),
        )

    def test_sizes_follow_the_width(self):
        tables = FeatureTables(ROWS, context=CONTEXT_ROWS, item_places=2, context_places=3)
        model = build_module(self.configure(), 30, 8, tables)
        assert type(model) is DlrmRanking and model.encoder.context == 3
        assert model.content[0].out_features == 8 and model.judge[0].out_features == 16
        assert model.encoder.position.shape == (28, 16)  # context, events, candidate, and none
        assert model.encoder.max_length == 24 and model.bits == 3
        given = {"input_hidden": 5, "head_hidden": 7, "positions": 9, "time_buckets": 4}
        model = build_module(self.configure(**given), 30, 0, tables)
        assert model.content[0].out_features == 5 and model.judge[0].out_features == 7
        assert (len(model.encoder.position), len(model.encoder.time)) == (9, 5)
        assert model.bits == 0

    def test_costs_know_the_layers_and_the_networks(self):
        tables = FeatureTables(ROWS, context=CONTEXT_ROWS, item_places=2, context_places=3)
        config, more = self.configure(), (3, 16 * 8 * 2 + 32 * 8 + 8 * 16)
        module = build_module(config, 30, 8, tables)
        assert count_extra_work(module) == more
        cost = build_balancer(config, torch.device("cpu"), *more).cost
        usual = CostModel.of_hstu(
            width=16, layers=2, heads=2, d_qk=8, d_v=8, tasks=1, wide=True, inputs=more[1]
        )
        assert cost == usual.with_prefix(3)

    def test_what_does_not_go_together(self):
        for wrong, message in (
            ({"task": "retrieval"}, "--head dlrm judges candidates"),
            ({"encoder": "sasrec"}, "without --encoder sasrec"),
            ({"time_bias": True}, "without --time-bias"),
            ({"head": "linear", "positions": 4}, "--positions is for --head dlrm"),
        ):
            with pytest.raises(ValueError, match=message):
                self.configure(**wrong)
        tables = FeatureTables(ROWS, context=CONTEXT_ROWS, item_places=2, context_places=3)
        with pytest.raises(ValueError, match="give --candidates 1"):
            build_module(self.configure(candidates=2), 30, 8, tables)
        assert build_module(self.configure(candidates=2), 30, 8).encoder.context == 0

    def test_wide_layers_have_no_state_of_histories(self):
        encoder = HSTU(width=8, layers=1, heads=2, max_length=9, time_bias=False, wide=True)
        model = Retrieval(encoder, num_items=9).eval()
        with pytest.raises(ValueError, match="not for wide HSTU"):
            start_histories(model, make_batch())
        with pytest.raises(ValueError, match="wide HSTU has no portable form"):
            PaddedEncoder(encoder)
