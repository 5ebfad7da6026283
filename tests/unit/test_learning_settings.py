"""Settings that decide how fast a model learns: first rows, inputs, moments; and what runs meant
that were made before these settings existed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.small_runs import interactions
from torch import nn

from freescale.config import RunConfig
from freescale.models import HSTU, Retrieval
from freescale.random import derive, draw_keep_mask
from freescale.train.build import (
    build_model,
    build_module,
    build_optimizer,
    build_row_optimizer,
    choose_row_std,
)
from freescale.train.trainer import Trainer
from freescale.transport.local import LocalTransport

LENGTHS = torch.tensor([7, 0, 1, 12])
SHAPE = {"width": 8, "layers": 2, "heads": 2, "max_length": 12, "time_bias": False}
NEW = {"input_dropout", "input_scale", "row_std", "beta2"}


def encoder(kind=HSTU, **options):
    torch.manual_seed(0)
    return kind(**SHAPE | options).double().train()


def inputs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(int(LENGTHS.sum()), SHAPE["width"], generator=generator, dtype=torch.float64)
    return x, torch.tensor([11, 12, 13, 14])


def place_in_sample():
    return torch.cat([torch.arange(length) for length in LENGTHS.tolist()])


def test_inputs_are_scaled_and_dropped_by_the_keys_of_their_tokens():
    (x, keys), places = inputs(), place_in_sample()
    module = encoder(dropout=0.0, input_dropout=0.25, input_scale=3.0)
    plain = encoder(dropout=0.0, input_dropout=0.0, input_scale=1.0)
    nn.init.zeros_(plain.position)
    tokens = derive(torch.repeat_interleave(keys, LENGTHS), places)
    kept = draw_keep_mask(derive(tokens, 1 << 20), SHAPE["width"], 0.75)
    assert 0.6 < kept.double().mean() < 0.9
    expected = plain(kept * (3 * x + module.position[places]) / 0.75, LENGTHS)
    torch.testing.assert_close(module(x, LENGTHS, keys), expected, rtol=1e-12, atol=1e-12)
    # an evaluation drops nothing, and the layers drop nothing of their own
    whole = plain(3 * x + module.position[places], LENGTHS)
    torch.testing.assert_close(module.eval()(x, LENGTHS), whole, rtol=1e-12, atol=1e-12)


def test_layers_drop_what_they_did_whatever_the_inputs_drop():
    """The draws of the inputs are none of the layers'."""
    x, keys = inputs()
    module = encoder(dropout=0.5, input_dropout=0.0)
    every = [draw_keep_mask(derive(keys, stream), 64, 0.5) for stream in (0, 1, 1 << 20)]
    assert not torch.equal(every[0], every[2]) and not torch.equal(every[1], every[2])
    with pytest.raises(ValueError, match="dropout needs keys"):
        module(x, LENGTHS)
    assert module.input_dropout == 0.0 and encoder(dropout=0.5).input_dropout == 0.5


def config(**settings):
    return RunConfig.from_settings({"data": "histories.parquet", "width": 16} | settings)


def test_settings_reach_model_rows_and_optimizers():
    given = config(row_std=0.3, input_scale=2.0, input_dropout=0.4, beta1=0.8, beta2=0.9)
    data = SimpleNamespace(num_items=4000, num_actions=0, features=None)
    sharded = build_model(given, data, LocalTransport())
    encoder = sharded.module.encoder
    assert (encoder.input_scale, encoder.input_dropout) == (2.0, 0.4)
    assert build_optimizer(given, sharded).defaults["betas"] == (0.8, 0.9)
    assert sharded.tables.optimizers["item"].betas == (0.8, 0.9)
    sharded.tables.place(None)
    assert sharded.tables.get_local_rows("item")[1].std().item() == pytest.approx(0.3, rel=0.02)
    # and a setting that is left out is what its help says
    usual = config(dropout=0.15)
    module = build_module(usual, 9, 0)
    assert (module.encoder.input_scale, module.encoder.input_dropout) == (4.0, 0.15)
    assert choose_row_std(usual) == usual.model.row_std


def test_rows_without_adam_have_no_moments():
    assert not hasattr(build_row_optimizer(config(row_optimizer="adagrad")), "betas")


def test_a_run_made_before_these_settings_keeps_its_meaning():
    raw = json.loads(config(dropout=0.3).to_json())
    for part in raw.values():
        for name in NEW & set(part):
            del part[name]
    old = RunConfig.from_json(json.dumps(raw))
    assert (old.model.input_scale, old.model.input_dropout) == (1.0, 0.0)
    assert choose_row_std(old) == 0.25 and old.train.beta2 == 0.999  # 16 ** -0.5
    # as it is written now, it is read again
    assert RunConfig.from_json(old.to_json()) == old
    new = config()
    assert RunConfig.from_json(new.to_json()) == new


@pytest.mark.parametrize(
    ("part", "switch", "value", "more"),
    [
        ("model", "segment", 16, "segment_tokens"),
        ("train", "compress_dense", 0.9, "compress_every"),
    ],
)
def test_runs_that_used_a_removed_setting_are_refused_and_others_load(part, switch, value, more):
    raw = json.loads(config().to_json())
    raw[part] |= {switch: None, more: 4}
    assert RunConfig.from_json(json.dumps(raw)) == config()
    raw[part][switch] = value
    flag = switch.replace("_", "-")
    with pytest.raises(ValueError, match=f"config.json has --{flag} {value}, which was removed"):
        RunConfig.from_json(json.dumps(raw))


def test_a_model_on_its_own_starts_with_rows_as_small():
    model = Retrieval(HSTU(**SHAPE), num_items=3000)
    usual = choose_row_std(config())
    assert model.item.weight.std().item() == pytest.approx(usual, rel=0.02)


def test_labels_have_weights(tmp_path):
    random = np.random.default_rng(0)
    flags = {name: random.integers(0, 2, 480) for name in ("like", "buy")}
    given = {
        "data": str(interactions(tmp_path / "data.parquet", **flags)),
        "cache": str(tmp_path / "cache"),
        "task": "ranking",
        "labels": "like,buy",
        "device": "cpu",
        "width": 8,
    }
    config = RunConfig.from_settings(given | {"task_weights": "buy=0.5, like=2"})
    trainer = Trainer(config, tmp_path / "run")
    assert trainer.pipeline.schedule.task_weights == {"buy": 0.5, "like": 2.0}
    assert RunConfig.from_json(config.to_json()).task_weights == {"buy": 0.5, "like": 2.0}
    assert RunConfig.from_settings(given).task_weights == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("share=1", "has 'share=1'; name each label once, of: like, buy"),
        ("buy=1,buy=2", "has 'buy=2'; name each label once"),
        ("buy", "has 'buy'; write a number"),
        ("buy=-1", "has 'buy=-1'; write a number"),
        ("buy=inf", "has 'buy=inf'; write a number"),
        ("buy=much", "has 'buy=much'; write a number, as buy=0.5"),
    ],
)
def test_a_weight_of_no_label_or_no_number_is_refused(given, message):
    settings = {"data": "x", "task": "ranking", "labels": "like,buy", "task_weights": given}
    with pytest.raises(ValueError, match=f"--task-weights {message}"):
        RunConfig.from_settings(settings)
