"""Asynchronous checkpoints: what is written beside training is the state of its step, one at a
time; a kill at any moment leaves one that loads, and errors are raised where the next one waits."""

from __future__ import annotations

import errno
import shutil
import threading

import pytest
import torch
from helpers.checkpoints import batches, build, killed_at
from helpers.ranks import run_ranks
from helpers.training import snapshot

from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from freescale.data.synthetic.generate import generate
from freescale.train.callbacks import Callback
from freescale.train.state import checkpoints
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.finite_check import NotFinite
from freescale.train.torch_files import tensor_writer as errors
from freescale.train.trainer import Trainer
from freescale.transport.local import LocalTransport


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def load(folder, step):
    parallel, dense, _ = build(LocalTransport())
    found = Checkpoints(folder, LocalTransport())
    found.load(found.path(step), parallel, dense)
    return snapshot(parallel)


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("full_every", [1, 9], ids=["full", "delta"])
def test_what_is_written_is_the_state_of_its_step(tmp_path, monkeypatch, full_every):
    """The writer begins when training has gone on, and the next save waits for it."""
    gate, write = threading.Event(), checkpoints.write_checkpoint

    def write_late(*arguments):
        assert gate.wait(30)
        return write(*arguments)

    parallel, dense, pipeline = build(LocalTransport())
    saved = Checkpoints(tmp_path, LocalTransport(), full_every=full_every, asynchronous=True)
    states = {}
    for result in pipeline.run(batches(LocalTransport(), 0, 4)):
        if result.step == 2:
            saved.wait()
            monkeypatch.setattr(checkpoints, "write_checkpoint", write_late)
        if result.step < 3:
            states[result.step] = snapshot(parallel)
            assert saved.save(parallel, dense, {"step": result.step}) == saved.path(result.step)
    assert names(tmp_path) == ["step-00000001"]  # two steps further on
    threading.Timer(0.2, gate.set).start()
    saved.save(parallel, dense, {"step": 4})
    assert "step-00000002" in names(tmp_path)
    assert saved.wait() == tmp_path / "step-00000004" and saved.wait() is None
    assert_equal(load(tmp_path, 2), states[2])
    assert_equal(load(tmp_path, 4), snapshot(parallel))


def test_errors_of_the_writer_are_raised_where_the_next_one_waits(tmp_path, monkeypatch):
    parallel, dense, pipeline = build(LocalTransport())
    saved = Checkpoints(tmp_path, LocalTransport(), full_every=9, asynchronous=True)
    list(pipeline.run(batches(LocalTransport(), 0, 1)))
    saved.save(parallel, dense, {"step": 1})
    saved.wait()
    list(pipeline.run(batches(LocalTransport(), 1, 2)))

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(errors.FileSystemWriter, "write_data", fail)
        saved.save(parallel, dense, {"step": 2})
        with pytest.raises(ValueError, match="step-00000002 could not be written: the disk is f"):
            saved.save(parallel, dense, {"step": 3})
    assert names(tmp_path) == ["step-00000001"]
    saved.save(parallel, dense, {"step": 3})  # a full one: what the lost one held is not marked
    saved.wait()
    assert_equal(load(tmp_path, 3), snapshot(parallel))
    parallel.module.layers[0].weight.data.fill_(torch.nan)
    saved.save(parallel, dense, {"step": 4})
    with pytest.raises(NotFinite, match="layers.0.weight is not finite at step 4"):
        saved.wait()
    assert saved.steps() == [1, 3]
    saved.save(parallel, dense, {"step": 4})
    with pytest.warns(UserWarning, match="not finite at step 4.*Taking one before"):
        assert saved.find("last").path == saved.path(3)


def fail_on_one_rank(transport, folder):
    """Saves at each of four steps, of which rank 1 cannot copy the second."""
    parallel, dense, pipeline = build(transport)
    saved = Checkpoints(folder, transport, keep=9, full_every=2, asynchronous=True)
    collect, heard, states = checkpoints.DiskContents.collect, [], {}

    def fail(*arguments, **named):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    for result in pipeline.run(batches(transport, 0, 4)):
        broken = result.step == 2 and transport.rank == 1
        checkpoints.DiskContents.collect = fail if broken else collect
        saved.save(parallel, dense, {"step": result.step})
        try:
            saved.wait()
            states[result.step] = snapshot(parallel)
        except ValueError as error:
            heard.append(str(error))
    return heard, saved.steps(), states


def test_what_one_rank_cannot_copy_is_not_saved_by_any(tmp_path):
    """Nobody waits for it, and the next one is there: with the plan of the one before the lost."""
    for heard, steps, states in run_ranks(2, fail_on_one_rank, str(tmp_path)):
        assert heard == ["[Errno 12] Cannot allocate memory"] and steps == [1, 3, 4]
        for step in steps:
            assert_equal(load(tmp_path, step), states[step])


def test_a_kill_at_any_point_of_a_chain_leaves_a_checkpoint_that_loads(tmp_path):
    """Steps 1 and 2 are a chain; 3 is a full one, and takes their place."""
    parallel, dense, pipeline = build(LocalTransport())
    saved = Checkpoints(tmp_path / "run", LocalTransport(), keep=1, full_every=2, asynchronous=True)
    states = {}
    for result in pipeline.run(batches(LocalTransport(), 0, 3)):
        states[result.step] = snapshot(parallel)
        if result.step < 3:
            saved.save(parallel, dense, {"step": result.step})
    saved.wait()
    shutil.copytree(tmp_path / "run", tmp_path / "whole")

    def save():
        saved.save(parallel, dense, {"step": 3})
        saved.wait()

    number, found = 0, []
    while killed_at(number, save):
        fresh, optimizer, _ = build(LocalTransport())
        again = Checkpoints(tmp_path / "run", LocalTransport(), keep=1)
        step = again.load(again.last_intact(), fresh, optimizer)["step"]
        assert_equal(snapshot(fresh), states[step])
        found.append(step)
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "whole", tmp_path / "run")
        number += 1
    assert number > 10 and found == sorted(found) and {*found} == {2, 3}
    assert names(tmp_path / "run") == ["step-00000003"]


class Seen(Callback):
    def __init__(self):
        self.paths = []

    def on_checkpoint(self, trainer, path):
        assert (path / "state.json").exists()
        self.paths.append(path.name)


def train(folder, steps, resume=False, **options):
    data = folder / "data.parquet"
    if not data.exists():
        generate(data, users=60, items=40, median=8.0, cap=12, seed=1)
    sizes = DataConfig(data=str(data), max_length=10, negatives=4)
    settings = TrainConfig(global_batch=8, steps=steps, trace_steps=0, **options)
    config = RunConfig(sizes, ModelConfig(width=8, layers=1, heads=1), settings)
    seen, name = Seen(), "chain" if options else "plain"
    trainer = Trainer(
        config,
        folder / name,
        resume=resume,
        histories=data,
        transport=LocalTransport(),
        callbacks=[seen],
    )
    trainer.train()
    return snapshot(trainer.model), seen.paths


def test_a_run_with_both_resumes_to_the_bit(tmp_path):
    options = {"checkpoint_every": 2, "full_every": 3, "async_checkpoints": True}
    _, paths = train(tmp_path, 5, **options)
    assert paths == ["step-00000002", "step-00000004", "step-00000005"]
    found, _ = train(tmp_path, 9, resume=True, **options)
    expected, _ = train(tmp_path, 9)
    assert_equal(found, expected)
