"""Consecutive checkpoints are planned once, as long as their tensors are alike, and hold what they
should."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load

from freescale.train.torch_files import tensor_writer
from freescale.train.torch_files.tensor_writer import TensorWriter
from freescale.transport.local import LocalTransport


@pytest.fixture
def plans(monkeypatch):
    """The number of tensors of each plan that is made."""
    make, made = default_planner.create_default_local_save_plan, []

    def make_and_count(tensors, is_coordinator):
        made.append(len(tensors))
        return make(tensors, is_coordinator)

    monkeypatch.setattr(default_planner, "create_default_local_save_plan", make_and_count)
    monkeypatch.setattr(tensor_writer, "_PAUSE", 0.0)
    return made


def save(folder, writer, **tensors):
    """Saves, and loads what was saved."""
    writer.write(folder, tensors, LocalTransport(), "failed")
    found = {name: torch.zeros_like(value) for name, value in tensors.items()}
    load(found, checkpoint_id=folder, no_dist=True)
    for name, value in tensors.items():
        assert torch.equal(found[name], value), name


def test_tensors_alike_are_planned_once(tmp_path, plans):
    one, other = TensorWriter(paced=True), TensorWriter(paced=True)
    save(tmp_path / "1", one, rows=torch.rand(4, 3), step=torch.tensor(1.0))
    save(tmp_path / "2", one, rows=torch.rand(4, 3), step=torch.tensor(2.0))
    assert plans == [2]
    save(tmp_path / "3", other, rows=torch.rand(4, 3), step=torch.tensor(3.0))
    assert plans == [2, 2]
    save(tmp_path / "4", one, rows=torch.rand(4, 3), step=torch.tensor(4.0))
    assert plans == [2, 2]


def test_a_plan_that_failed_is_made_anew(tmp_path, plans, monkeypatch):
    """It may have been on other ranks, which write by it since: the plan before is theirs no
    more."""
    writer, rows = TensorWriter(paced=True), torch.rand(4, 3)
    save(tmp_path / "1", writer, rows=rows)

    def fail(self, plans):
        raise OSError("no room")

    with monkeypatch.context() as during:
        during.setattr(DefaultSavePlanner, "create_global_plan", fail)
        with pytest.raises(ValueError, match="failed: no room"):
            save(tmp_path / "2", writer, rows=rows, ids=rows)
    save(tmp_path / "3", writer, rows=rows)
    assert plans == [1, 2, 1]
    save(tmp_path / "4", writer, rows=rows)
    assert plans == [1, 2, 1]


@pytest.mark.parametrize("stage", ["write_data", "finish"])
def test_what_cannot_be_written_by_a_plan_is_said(tmp_path, plans, monkeypatch, stage):
    writer, rows = TensorWriter(paced=True), torch.rand(4, 3)
    save(tmp_path / "1", writer, rows=rows)

    def fail(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as during:
        during.setattr(FileSystemWriter, stage, fail)
        with pytest.raises(ValueError, match="failed: the disk is full"):
            save(tmp_path / "2", writer, rows=rows)
    save(tmp_path / "3", writer, rows=rows)
    assert plans == [1]


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": torch.rand(5, 3)},
        {"rows": torch.rand(4, 3).double()},
        {"ids": torch.rand(4, 3)},
        {"rows": torch.rand(4, 3), "ids": torch.arange(4)},
    ],
)
def test_others_are_planned_anew(tmp_path, plans, changed):
    writer = TensorWriter(paced=True)
    save(tmp_path / "1", writer, rows=torch.rand(4, 3))
    save(tmp_path / "2", writer, **changed)
    save(tmp_path / "3", writer, rows=torch.rand(4, 3))
    assert plans == [1, len(changed), 1]
