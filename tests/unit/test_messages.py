"""What the command line says where a user has to do something: no advice leads back to itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from freescale.cli.train import train_run
from freescale.config import RunConfig, TrainConfig
from freescale.train.position import Position
from freescale.train.run_state import RunState
from freescale.transport.connect import choose_device


@pytest.mark.parametrize(
    ("gpus", "ranks", "words"),
    [
        (0, 1, "torch finds no GPU on this machine: pass --device cpu"),
        (1, 2, "2 ranks on this machine, but it has 1 GPU and .* start 1 .--nproc 1."),
        (3, 4, "4 ranks on this machine, but it has 3 GPUs and .* start 3 .--nproc 3."),
    ],
)
def test_too_few_gpus(gpus, ranks, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=words):
        choose_device("cuda", 0, ranks)


@pytest.mark.parametrize(
    ("steps", "epochs", "words"),
    [
        (40, 10, "has made 40 steps, and --steps is 40: pass a larger --steps"),
        (30, 10, "has made 40 steps, and --steps is 30: pass a larger --steps"),
        (None, 4, r"and --epochs 4 ends after 40: pass a larger --epochs to continue$"),
        (90, 4, r"pass a larger --epochs to continue \(--steps 90 alone does not\)"),
    ],
)
def test_a_complete_run_names_the_setting_that_ends_it(steps, epochs, words):
    config = RunConfig.from_settings({"data": "h.parquet", "steps": steps, "epochs": epochs})
    per_epoch = 10
    data = SimpleNamespace(stop=per_epoch * epochs, time=None)
    position = Position(config.train, SimpleNamespace(steps=40), data)
    with pytest.raises(ValueError, match=words):
        position.refuse_end(Path("run"))


@pytest.mark.parametrize(
    ("saved", "ranks", "words"),
    [
        (2, 2, "resumed after step 24, from run/checkpoints/step-24"),
        (2, 1, "saved on 2 ranks and continues on 1 rank:"),
        (1, 8, "saved on 1 rank and continues on 8 ranks:"),
    ],
)
def test_resuming_on_another_number_of_ranks_is_said(saved, ranks, words):
    progress = {"step": 24, "pipeline": None, "data": None}
    found = SimpleNamespace(path=Path("run/checkpoints/step-24"), state={"ranks": saved})
    loads = SimpleNamespace(load_state_dict=lambda state: None, start=24)
    state = RunState(
        SimpleNamespace(find=lambda name: found, load=lambda *_: progress),
        SimpleNamespace(transport=SimpleNamespace(world=ranks)),
        None,
        Position(TrainConfig(), loads, loads),
    )
    assert state.load() == 24
    (note,) = state.notes
    assert words in note and ("continues" in note) is (saved != ranks)


def test_data_that_a_moved_command_does_not_find(tmp_path, monkeypatch):
    config = RunConfig.from_settings({"data": "h.parquet"})
    (tmp_path / "config.json").write_text(config.to_json())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"h.parquet: no such file, seen from .*pass --data"):
        train_run(1, tmp_path, "last", None, {})
