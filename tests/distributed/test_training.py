"""The real thing on several ranks against one process: HSTU on histories from a file, negatives and
dropout on."""

from __future__ import annotations

import pytest
import torch
from helpers.loading import load_histories
from helpers.ranks import run_ranks
from helpers.training import snapshot

import freescale
from freescale.data.synthetic.generate import generate
from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU
from freescale.transport.local import LocalTransport

LABELS = ("is_click", "is_like")
NEGATIVES = (
    {"count": 12, "in_batch_share": 0.5, "source": "popularity"},
    {"source": "all"},
)


def steps(transport, path, task, placement, number):
    """A step for each kind of negatives."""
    kinds = NEGATIVES if task == "retrieval" else NEGATIVES[:1]
    return [step(transport, path, task, placement, number, kind) for kind in kinds]


def step(transport, path, task, placement, number, negatives):
    """One step on global batch `number`, from the initial state."""
    options = {
        "task": task,
        "tasks": LABELS if task == "ranking" else (),
        "halo": 4,
        **negatives,
    }
    data = load_histories(
        path,
        13,
        rank=transport.rank,
        world=transport.world,
        max_length=15,
        candidates=4,
        seed=3,
        **options,
    )
    torch.manual_seed(0)
    encoder = HSTU(
        width=8, layers=2, heads=2, max_length=20, dropout=0.3, position_bias=True, time_bias=True
    )
    sizes = {"num_items": data.num_items, "num_actions": data.num_actions, "table_device": "meta"}
    model = (
        Ranking(encoder, tasks=LABELS, **sizes)
        if task == "ranking"
        else Retrieval(encoder, **sizes)
    ).double()
    parallel = freescale.parallelize(
        model,
        model.features,
        freescale.Adagrad(lr=0.1),
        transport=transport,
        placement=placement,
        init_std=0.3,
    )
    parallel.tables.place()
    before = snapshot(parallel)
    optimizer = torch.optim.SGD(parallel.dense_parameters(), lr=0.1)
    pipeline = freescale.Pipeline(parallel, optimizer, accumulate=2, clip=1.0)
    (result,) = pipeline.run([data.batch(number)])
    return result.loss, before, snapshot(parallel)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "histories.parquet"
    generate(
        path,
        users=40,
        items=60,
        median=8,
        cap=30,
        global_batch=13,
        actions=True,
        labels=LABELS,
        seed=2,
    )
    return str(path)


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_a_step_does_not_depend_on_the_number_of_ranks(path, task, placement):
    for number in (0, 3):  # the last batch of the epoch has one sample: two ranks stay empty
        alone = steps(LocalTransport(), path, task, placement, number)
        for _, before, expected in alone:
            changed = [name for name in expected if not torch.equal(before[name], expected[name])]
            assert "item/rows" in changed and "encoder.layers.0.projection.weight" in changed
        for found in run_ranks(3, steps, path, task, placement, number):
            for (actual_loss, _, actual), (loss, _, expected) in zip(found, alone, strict=True):
                assert actual_loss == pytest.approx(loss, rel=1e-12)
                for name, value in expected.items():
                    torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-14)
