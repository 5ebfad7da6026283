"""Nothing compiles in the middle of training: a run on a GPU, what it compiles named."""

from __future__ import annotations

import pytest
import torch

from freescale import RunConfig, Trainer
from freescale.config import DataConfig, ModelConfig, TrainConfig
from freescale.data.synthetic.generate import generate
from freescale.train.callbacks import Callback
from freescale.train.device_figures import watch_compilations

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Compilations(Callback):
    def __init__(self):
        self.after = []

    def on_start(self, trainer):
        self.list_compiled = watch_compilations()

    def on_step(self, trainer, step):
        self.after.append(self.list_compiled())

    def on_evaluation(self, trainer, metrics, part):
        self.after.append(self.list_compiled())


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
def test_no_kernel_is_compiled_in_a_step(tmp_path, biases):
    data = tmp_path / "data.parquet"
    generate(
        data, users=300, items=400, median=20, sigma=0.6, cap=60,
        global_batch=64, collision=None, seed=1,
    )  # fmt: skip
    compilations = Compilations()
    config = RunConfig(
        data=DataConfig(data=str(data), max_length=60, negatives=16),
        model=ModelConfig(
            width=64, layers=2, heads=2, dropout=0.1, position_bias=biases, time_bias=biases
        ),
        train=TrainConfig(
            device="cuda", precision="bf16", global_batch=16, steps=12, evaluate_every=1
        ),
    )
    Trainer(config, tmp_path / "run", callbacks=[compilations]).train()
    after = compilations.after
    assert len(after) > 10
    assert after[-1] == [], (list(map(len, after)), after[-1])
