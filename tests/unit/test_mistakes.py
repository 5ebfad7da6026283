"""Mistakes that a new user makes, each answered by one line with the value and the fix."""

from __future__ import annotations

import pytest
import torch
from helpers.toys import Clicks, clicks_batch
from torch import nn

import freescale
from freescale import Balancer, Checkpoints, CostModel, Pipeline, SequenceBatch


class Returning(Clicks):
    """Clicks, with something else than summed losses."""

    def __init__(self, change) -> None:
        super().__init__()
        self._change = change

    def forward(self, batch):
        return self._change(super().forward(batch))


def sharded(model=None, **options):
    return freescale.parallelize(model or Clicks(), Clicks.ids, **options)


def adam(model):
    return torch.optim.AdamW(model.dense_parameters(), lr=1e-2)


def train(model, batches=None, **options):
    pipeline = Pipeline(model, adam(model), **options)
    return list(pipeline.run(batches or [clicks_batch(4, 0)]))


def train_returning(change):
    return train(sharded(Returning(change)))


def train_raw():
    model = Clicks()
    return Pipeline(model, torch.optim.SGD(model.layers.parameters(), lr=0.1))


def train_on_mixed_devices():
    batch = clicks_batch(4, 0)
    parts = {**batch.parts(), "d/labels": torch.ones(4, 2, device="meta")}
    return train(sharded(), [batch.with_parts(parts)])


def save(folder, progress):
    model = sharded()
    train(model)
    return Checkpoints(str(folder), model.transport).save(model, adam(model), progress)


def export_twice(folder):
    saved = save(folder / "checkpoints", {"step": 1})
    freescale.export(saved, folder / "out")
    freescale.export(saved, folder / "out", overwrite=True)
    freescale.export(saved, folder / "out")


CASES = {
    "loss as a scalar": (
        lambda _: train_returning(lambda losses: sum(losses.values())),
        TypeError,
        r"returned a tensor of shape \[\]: return a dict .* \{'click': loss, 'like': loss\}",
    ),
    "loss as a tuple": (
        lambda _: train_returning(lambda losses: tuple(losses.values())),
        TypeError,
        "returned a tuple: return a dict with the summed loss",
    ),
    "loss as a number": (
        lambda _: train_returning(lambda losses: {task: 1.0 for task in losses}),
        TypeError,
        "loss of task 'click' is a float: return a scalar tensor",
    ),
    "per-sample loss": (
        lambda _: train_returning(lambda losses: {t: x.expand(4) for t, x in losses.items()}),
        ValueError,
        r"loss of task 'click' has shape \[4\]: return its sum",
    ),
    "a dict as batch": (
        lambda _: train(sharded(), [{"history": torch.ones(3)}]),
        TypeError,
        "a batch is a freescale.SequenceBatch, not a dict",
    ),
    "a dict as batch of an evaluation": (
        lambda _: freescale.evaluate(sharded(), [{"history": torch.ones(3)}]),
        TypeError,
        "a batch is a freescale.SequenceBatch, not a dict",
    ),
    "learning_rate as a number": (
        lambda _: train(sharded(), learning_rate=1e-3),
        TypeError,
        r"learning_rate=0.001 is not a function: .*lambda step",
    ),
    "a torch optimizer as row_optimizer": (
        lambda _: sharded(row_optimizer=torch.optim.SGD([torch.ones(1)], lr=0.1)),
        TypeError,
        "row_optimizer is torch.optim.sgd.SGD, .* give freescale.SGD",
    ),
    "a class as row_optimizer": (
        lambda _: sharded(row_optimizer=freescale.Adam),
        TypeError,
        "row_optimizer is freescale.embedding.optimizers.Adam, .* with lr",
    ),
    "a raw model in Pipeline": (
        lambda _: train_raw(),
        TypeError,
        r"not a Clicks: sharded = freescale.parallelize\(model",
    ),
    "a row optimizer in Pipeline": (
        lambda _: Pipeline(sharded(), freescale.Adam(lr=0.1)),
        TypeError,
        "optimizer is a Adam: give a torch optimizer of sharded.dense_parameters",
    ),
    "ids as a list": (
        lambda _: freescale.parallelize(Clicks(), ["item"]),
        ValueError,
        r"ids is \['item'\]: map each embedding",
    ),
    "init_std beside weights that are kept": (
        lambda _: freescale.parallelize(
            nn.ModuleDict({"item": nn.Embedding(3, 2)}), {"item": ["history"]}, init_std=0.1
        ),
        ValueError,
        "init_std=0.1 has no effect: .* init='rows' draws",
    ),
    "progress without a step": (
        lambda folder: save(folder, {"epoch": 1}),
        ValueError,
        r"progress is \{'epoch': 1\} and has no 'step': give \{'step': pipeline.steps",
    ),
    "a batch on two devices": (
        lambda _: train_on_mixed_devices(),
        ValueError,
        "several devices .*labels on meta.*: put it on the CPU",
    ),
    "an unknown partitioner": (
        lambda _: train(sharded(), balance="fair"),
        ValueError,
        "unknown partitioner 'fair'; there is .*greedy",
    ),
    "a cost model as balance": (
        lambda _: train(sharded(), balance=5),
        TypeError,
        "partitioner is 5: give a name",
    ),
    "balancing by a feature that the batch lacks": (
        lambda _: train(sharded(), balance=Balancer("greedy", CostModel(0, 1), feature="clicks")),
        ValueError,
        "'clicks', which the batch lacks; its sequences are actions, history",
    ),
    "an export over another": (
        export_twice,
        ValueError,
        "out already holds an export: name another folder, or pass overwrite=True to replace it",
    ),
    "state_dict of a sharded model": (
        lambda _: sharded().state_dict(),
        RuntimeError,
        "no state_dict, .*freescale.Checkpoints.*freescale.export",
    ),
    "load_state_dict of a sharded model": (
        lambda _: sharded().load_state_dict({}),
        RuntimeError,
        "no state_dict to load into: .*before parallelize, which keeps them",
    ),
    "a call outside a step": (
        lambda _: sharded()(clicks_batch(4, 0)),
        RuntimeError,
        r"'item' is read outside a step: use freescale.evaluate.*sharded.reading\(batch\)",
    ),
    "an evaluation that returns a scalar": (
        lambda _: freescale.evaluate(
            sharded(), [clicks_batch(4, 0)], lambda batch, output: {"loss": output["click"]}
        ),
        ValueError,
        r"measure 'loss' is \[\]: return one value for each of the 4 samples, or a pair",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_answered_with_the_value_and_the_fix(case, tmp_path):
    mistake, kind, message = CASES[case]
    with pytest.raises(kind, match=message) as caught:
        mistake(tmp_path)
    assert "\n" not in str(caught.value)


def test_checkpoints_take_a_folder_as_text(tmp_path):
    saved = save(tmp_path / "ck", {"step": 1})
    assert saved == tmp_path / "ck" / "step-00000001" and saved.is_dir()


def test_costs_without_lengths_need_no_feature():
    constant = Balancer("greedy", CostModel(0.0, 0.0, constant=1.0), feature="clicks")
    assert len(train(sharded(), balance=constant)) == 1


def test_a_batch_without_samples_is_no_mistake():
    empty = clicks_batch(4, 0).slice(0, 0)
    assert isinstance(empty, SequenceBatch) and train(sharded(), [empty], balance="greedy")[0].step
