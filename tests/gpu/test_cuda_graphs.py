"""CUDA graphs of small batches: the bits of a replay are those of launches one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from freescale_bench.train.measure import build_config
from freescale_bench.train.shapes import SHAPES, write_interactions

import freescale.pipeline.captured.graphs as graphs
from freescale.train.callbacks import Callback
from freescale.train.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = 24


class Losses(Callback):
    def __init__(self):
        self.found = []

    def on_step(self, trainer, step):
        self.found.append(step.loss)


MODELS = {
    "plain": {"position_bias": False, "time_bias": False},
    "biases": {},
    "semi-local": {"attend": "first=8,last=40"},
    "sasrec": {"encoder": "sasrec", "position_bias": False, "time_bias": False},
}


@pytest.fixture(scope="module", params=MODELS)
def runs(request, tmp_path_factory):
    """Of a jagged file, by how it was trained: losses, rows, dense parameters, graphs."""
    folder = tmp_path_factory.mktemp("graphs")
    shape = replace(SHAPES["short"], samples=32, batches=7, items=500, negatives=16)
    file = write_interactions(shape, folder / "file.parquet")
    found = {}
    for name, launched, work in (
        ("graphs", 1, graphs._MOST_WORK),
        ("again", 1, graphs._MOST_WORK),
        ("launched", 10**9, graphs._MOST_WORK),
        ("serial", 1, graphs._MOST_WORK),
        ("as they are", 1, 0),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs, "_LAUNCHED", launched)
            patch.setattr(graphs, "_MOST_WORK", work)
            config = build_config(shape, file, folder / "cache", "cuda", STEPS)
            config = replace(config, model=replace(config.model, **MODELS[request.param]))
            schedule = "serial" if name == "serial" else "staged"
            config = replace(config, train=replace(config.train, schedule=schedule))
            losses = Losses()
            trainer = Trainer(config, folder / name.replace(" ", "-"), callbacks=[losses])
            trainer.train()
        tensors = [trainer.model.tables.get_local_rows("item")[1].clone()]
        tensors += [p.detach().clone() for p in trainer.model.dense_parameters()]
        steps = trainer.pipeline.schedule._graphs._steps.values()
        found[name] = losses.found, tensors, sum(step.captured for step in steps)
    return found


def test_a_replay_gives_the_bits_of_launches(runs):
    losses, tensors, captured = runs["graphs"]
    assert captured > 0
    assert all(runs[other][2] == 0 for other in ("launched", "serial", "as they are"))
    for other in ("again", "launched", "serial"):
        assert runs[other][0] == losses
        assert all(torch.equal(a, b) for a, b in zip(runs[other][1], tensors, strict=True))


def test_padding_changes_nothing_but_the_last_bits(runs):
    pairs = zip(runs["graphs"][0], runs["as they are"][0], strict=True)
    assert all(abs(a - b) < 2e-3 * abs(b) for a, b in pairs)
