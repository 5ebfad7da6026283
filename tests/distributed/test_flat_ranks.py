"""A model of your own on a flat table: the number of ranks and a resume change nothing."""

from __future__ import annotations

import pytest
import torch
from helpers.flat import FEATURES, TRAIN, write_table
from helpers.ranks import run_ranks
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import freescale
from freescale import Schema
from freescale.data import FlatTable, ReadSpec
from freescale.models import ItemTower

TASKS = ("click", "buy")


class Model(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.items = ItemTower(rows["item"], 6, rows["item_features"])
        self.user = nn.Embedding(rows["user"], 6)
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, batch):
        x = torch.cat([self.items(batch), self.user(batch.dense["user"])], 1)
        labels = batch.dense["labels"].to(x.dtype)
        losses = binary_cross_entropy_with_logits(self.layers(x), labels, reduction="none")
        return {n: (losses[:, i] * batch.weights[n]).sum() for i, n in enumerate(TASKS)}


def train(transport, folder, schedule, steps, saved=None, keep=None):
    """Losses of the steps [from the checkpoint `saved` on] of two epochs of 8 batches."""
    fitted = Schema.read(folder / "fitted.json")
    data = FlatTable(
        folder / "table.parquet", fitted, 20, where=TRAIN, cache=folder / "cache",
        labels="click,buy=paid>80", weights={"buy": "hour"},
        rank=transport.rank, world=transport.world, read=ReadSpec(epochs=2, seed=5),
    )  # fmt: skip
    torch.manual_seed(0)
    model = Model(fitted.rows).double()
    ids = {name: [name] for name in ("item", "item_features", "user")}
    sharded = freescale.parallelize(
        model, ids, freescale.Adam(lr=0.05), transport=transport, placement="sharded"
    )
    dense = torch.optim.AdamW(sharded.dense_parameters(), lr=0.01)
    pipeline = freescale.Pipeline(
        sharded, dense, schedule=schedule, task_weights={"buy": 0.5}, clip=1.0
    )
    if saved is not None:
        checkpoints = freescale.Checkpoints(folder / f"from-{saved}", transport)
        progress = checkpoints.load(checkpoints.last_intact(), sharded, dense)
        pipeline.load_state_dict(progress["pipeline"])
        data.load_state_dict(progress["data"])
    batches = (data.batch(number) for number in range(data.start, steps))
    losses = [result.loss for result in pipeline.run(batches)]
    if keep is not None:
        progress = {
            "step": pipeline.steps,
            "pipeline": pipeline.state_dict(),
            "data": data.state_dict(next=steps),
        }
        freescale.Checkpoints(folder / f"from-{keep}", transport).save(sharded, dense, progress)
    pipeline.close()
    return losses


@pytest.fixture
def folder(tmp_path):
    file = write_table(tmp_path / "table.parquet")
    Schema.infer(file, FEATURES, where=TRAIN).fit(file, where=TRAIN).write(tmp_path / "fitted.json")
    return tmp_path


@pytest.mark.parametrize("schedule", ["serial", "staged"])
def test_one_rank_and_two_have_the_same_losses(folder, schedule):
    (one,) = run_ranks(1, train, folder, schedule, 16)
    two, same = run_ranks(2, train, folder, schedule, 16)
    assert two == same and len(one) == 16 and one[-1] != one[0]
    torch.testing.assert_close(two, one, rtol=1e-12, atol=0)


def test_a_resume_on_another_number_of_ranks(folder):
    (whole,) = run_ranks(1, train, folder, "staged", 16)
    first, _ = run_ranks(2, train, folder, "staged", 5, None, "two")
    (rest,) = run_ranks(1, train, folder, "staged", 16, "two")
    torch.testing.assert_close(first + rest, whole, rtol=1e-12, atol=0)
