"""Snapshots in memory: a run that is killed goes on from them as if nothing had happened, from the
copy on another machine where its own is lost, and from disk where they do not fit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers.ranks import gather_ranks, run_ranks
from helpers.training import gather_tables

from freescale import RunConfig, Trainer
from freescale.data.synthetic.generate import generate
from freescale.launch.attempts import read_restarts
from freescale.train.callbacks import Callback
from freescale.train.state import snapshots as module
from freescale.train.state.disk import read_state
from freescale.train.state.held import Held
from freescale.train.state.holder_link import HolderLink, name_holder, read_run_id
from freescale.train.state.memory import Segment, StateFile, write_segment
from freescale.transport.local import LocalTransport
from freescale.transport.machine import identify_machine

EVERY = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "histories.parquet"
    return generate(path, users=48, items=2000, median=8.0, cap=12, seed=1).path


def configure(data: Path, **settings: object) -> RunConfig:
    given = {"global_batch": 16, "width": 8, "layers": 1, "negatives": 4, "max_length": 12}
    given |= {"data": str(data), "device": "cpu", "steps": 30, "epochs": 99}
    given |= {"trace_steps": 0, "log_every": 1, "split": "none", "placement": "sharded"}
    given |= {"checkpoint_every": 10, "full_every": 4, "snapshot_every": EVERY}
    return RunConfig.from_settings({**given, **settings})


class Kill(Callback):
    """After a step, if that is not 0. Every snapshot that was begun is complete before the next
    step but one is."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer, step):
        if trainer.snapshots is not None and trainer.snapshots.taking is not None:
            trainer.snapshots.taking.done.wait()
        if trainer.step == self.step:
            trainer.transport.gather_bytes(b"")
            os._exit(0)


def attempt(transport, data, folder, machines, resume, kill, settings):
    """Trains to the end, or until all ranks are killed. The state of the run and what it said."""
    module.identify_machine = lambda: machines[transport.rank]
    trainer = Trainer(
        configure(data, **settings),
        folder,
        histories=data,
        transport=transport,
        resume=resume,
        callbacks=[Kill(kill)],
    )
    notes = trainer.notes
    trainer.train()
    dense = {name: value.detach() for name, value in trainer.model.module.named_parameters()}
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return gather_tables(trainer.model) | dense, moments, notes


def attempt_without_a_copy(transport, *arguments):
    """The third snapshot finds no room at its buddy: it is left out on all ranks."""
    calls, update = [], StateFile.update

    def fail(self, *received):
        calls.append(self)
        if len(calls) == 3 and transport.rank == 1:
            raise OSError("no room")
        return update(self, *received)

    StateFile.update = fail
    return attempt(transport, *arguments)


def find_holders(folder, *machines):
    names = [name_holder(read_run_id(folder), machine) for machine in machines]
    links = [HolderLink.connect(name) for name in names]
    found = [link.process if link is not None else None for link in links]
    for link in links:
        if link is not None:
            link.close()
    return found


def assert_equal(found, expected):
    (tables, moments, _), (other_tables, other_moments, _) = found, expected
    assert tables.keys() == other_tables.keys() and len(moments) == len(other_moments)
    assert all(torch.equal(tables[name], other_tables[name]) for name in tables)
    assert all(torch.equal(*pair) for pair in zip(moments, other_moments, strict=True))


def test_checkpoint_snapshot_kill_restore_delta_kill_restore(data, tmp_path):
    """On two machines, one of which is lost with its memory: bit by bit the undisturbed run, also
    after a snapshot that only the buddy could not keep."""
    machines = [b"first", b"second"]
    plain = run_ranks(
        2, attempt, data, tmp_path / "plain", machines, False, 0, {"snapshot_every": None}
    )
    folder = tmp_path / "storm"

    def run(resume, kill):
        arguments = (data, folder, machines, resume, kill, {})
        work = attempt if resume else attempt_without_a_copy
        return gather_ranks(2, work, *arguments, lost=[0, 1] if kill else [])

    run(False, 17)  # a checkpoint after 10, snapshots up to 15
    holders = find_holders(folder, *machines)
    assert None not in holders
    os.kill(holders[1], signal.SIGKILL)  # the second machine is lost
    machines[1] = b"its replacement"
    run("auto", 24)  # another checkpoint after 20
    state = read_state(folder / "checkpoints" / "step-00000020")
    assert state["parent"]["step"] == 10
    (restart,) = read_restarts(folder)
    assert restart["step"] == 15
    for holder in find_holders(folder, *machines):
        os.kill(holder, signal.SIGKILL)
    results = run("auto", 0)
    for (error, found), expected in zip(results, plain, strict=True):
        assert error is None, error
        assert_equal(found, expected)
        assert any("step-00000020" in note for note in found[2])
        assert any("not from memory: no snapshot is in memory" in note for note in found[2])
    assert find_holders(folder, *machines, b"second") == [None, None, None]


# ---- one process


def leave(trainer, step):
    """Trains to a step and leaves as a process does that is killed: the holder stays."""
    trainer.callbacks._callbacks.append(Kill(0))
    steps = trainer.iterate()
    for _ in steps:
        if trainer.step == step:
            break
    if trainer.snapshots is not None:
        abandon = trainer.snapshots.abandon
        trainer.snapshots.abandon = lambda end: abandon(end=False)
    steps.close()


@pytest.fixture
def killed(data, tmp_path):
    """A run with a checkpoint after 10 and snapshots after 12 and 15; its holder."""
    folder = tmp_path / "run"
    leave(build(data, folder), 17)
    link = HolderLink.connect(name_holder(read_run_id(folder), identify_machine()))
    yield folder, link
    link.end()


def build(data, folder, resume=False, **settings):
    return Trainer(
        configure(data, **settings),
        folder,
        histories=data,
        transport=LocalTransport(),
        resume=resume,
    )


def open_newest(link):
    """The memory file of the newest step."""
    held = max(map(Held.parse, link.list()), key=lambda each: each.step)
    return held.name, Segment.open(link.get(held.name), "it")


def replace_header(link, **header):
    name, segment = open_newest(link)
    kept = {key: value for key, value in segment.header.items() if key != "tensors"}
    link.put(name, write_segment(kept | header, segment.read()).file)


def damage(link):
    os.pwrite(open_newest(link)[1].file, b"xyz", 300)


def halve(link):
    _, segment = open_newest(link)
    os.ftruncate(segment.file, segment.size // 2)


def rename_model(link):
    state = open_newest(link)[1].header["state"]
    replace_header(link, state=state | {"dense": {"other.weight": [[3], "torch.float32"]}})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(damage, "after step 15 is damaged", id="damaged"),
        pytest.param(halve, "after step 15 is half written", id="half written"),
        pytest.param(lambda link: replace_header(link, run="x"), "another run's", id="run"),
        pytest.param(
            lambda link: replace_header(link, step=18),
            "after step 15 holds another state: of rank 0 of 1 after step 18",
            id="later step",
        ),
        pytest.param(rename_model, "of another model", id="model"),
    ],
)
def test_what_is_not_the_run_s_is_refused_by_name(killed, data, spoil, words):
    folder, link = killed
    spoil(link)
    with pytest.warns(UserWarning, match=f"{words}.*Taking one before"):
        trainer = build(data, folder, "auto")
    assert trainer.step == 12 and "resumed after step 12, from memory" in trainer.notes[-1]
    trainer.run_folder.close()


def test_a_delta_after_a_restore_holds_everything_since_its_parent(killed, data, tmp_path):
    """On disk alone, without the memory that it was restored from."""
    folder, _ = killed
    build(data, folder, "auto").train()
    parents = {
        step: read_state(folder / "checkpoints" / f"step-{step:08d}")["parent"]["step"]
        for step in (20, 30)
    }
    assert parents == {20: 10, 30: 20}
    expected = build(data, tmp_path / "plain", snapshot_every=None)
    expected.train()
    restored = build(data, folder, "30", snapshot_every=None, steps=31)
    for name, value in gather_tables(expected.model).items():
        assert torch.equal(value, gather_tables(restored.model)[name])
    restored.run_folder.close()


def test_the_newest_is_taken_wherever_it_is(killed, data):
    folder, link = killed
    trainer = build(data, folder, "auto")
    assert trainer.step == 15 and link.list()
    trainer.run_folder.close()
    checkpoint = build(data, folder, "10")  # whoever names a checkpoint gets it
    assert checkpoint.step == 10 and not link.list()
    checkpoint.run_folder.close()


@pytest.mark.parametrize("every", [EVERY, None], ids=["with snapshots", "without"])
def test_snapshots_that_were_given_up_do_not_come_back(killed, data, every):
    """A run that goes back to a checkpoint, with or without snapshots of its own, is killed."""
    folder, _ = killed
    leave(build(data, folder, "10", snapshot_every=every), 11)
    trainer = build(data, folder, "auto")
    assert trainer.step == 10
    leave(trainer, 14)
    trainer = build(data, folder, "auto")
    assert trainer.step == 13 and "from memory" in trainer.notes[-1]
    trainer.train()
    assert find_holders(folder, identify_machine()) == [None]


def test_other_ranks_and_a_newer_checkpoint_go_on_from_disk(killed, data):
    folder, link = killed
    for name in link.list():  # as if four ranks had made them
        held = Held.parse(name)
        link.put(Held(4, held.owner, held.step).name, link.get(name))
        link.drop([name])
    trainer = build(data, folder, "auto")
    assert trainer.step == 10 and not link.list()
    assert "the snapshots in memory are of 4 ranks, not 1" in trainer.notes[-1]
    trainer.run_folder.close()


@pytest.mark.parametrize("host", [True, False], ids=["in place", "by way of host memory"])
def test_a_run_that_has_no_checkpoint_goes_on_from_memory(data, tmp_path, host, monkeypatch):
    """`host`: whether tables are in host memory; those of a GPU are copied there first."""
    monkeypatch.setattr("freescale.train.state.contents._is_on_host", lambda value: host)
    folder = tmp_path / "run"
    leave(build(data, folder, checkpoint_every=1000), 17)
    trainer = build(data, folder, "auto", checkpoint_every=1000)
    assert trainer.step == 15
    expected = build(data, tmp_path / "plain", checkpoint_every=1000, snapshot_every=None)
    trainer.train()
    expected.train()
    for name, value in gather_tables(expected.model).items():
        assert torch.equal(value, gather_tables(trainer.model)[name])
    assert find_holders(folder, identify_machine()) == [None]


def test_a_run_that_fails_leaves_no_holder(data, tmp_path):
    class Fail(Callback):
        def on_step(self, trainer, step):
            if trainer.step == 5:
                raise RuntimeError("no more")

    trainer = build(data, tmp_path / "run")
    trainer.callbacks._callbacks.append(Fail())
    with pytest.raises(RuntimeError, match="no more"):
        trainer.train()
    assert find_holders(tmp_path / "run", identify_machine()) == [None]


def test_on_slow_links_the_interval_grows(data, tmp_path, monkeypatch):
    grown = []

    class Note(Callback):
        def on_snapshot_interval(self, trainer, entry):
            grown.append(entry)

    whole = module.Snapshots._write

    def write(self, *arguments):
        whole(self, *arguments)
        time.sleep(0.3 if not grown else 0)

    monkeypatch.setattr(module.Snapshots, "_write", write)
    trainer = build(data, tmp_path / "run", steps=400, checkpoint_every=1000)
    trainer.callbacks._callbacks.append(Note())
    trainer.train()
    assert grown
    found = grown[0]["snapshot_interval"]
    assert found["asked"] == EVERY < found["steps"] <= trainer.snapshots.interval
    assert found["seconds"] > 0.3
    assert '"snapshot_interval"' in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_auto_finds_its_interval(data, tmp_path, monkeypatch):
    """Snapshots that take a second of a processor each, of steps that take less, are far apart."""
    monkeypatch.setattr("freescale.train.state.pace._FIRST", 2)
    monkeypatch.setattr("freescale.train.state.pace.StepCosts.estimate", lambda costs: 1.0)
    trainer = build(data, tmp_path / "run", snapshot_every="auto", checkpoint_every=1000)
    trainer.callbacks._callbacks.append(Kill(0))  # each snapshot is complete before the next step
    trainer.train()
    assert trainer.snapshots.interval > 2
    assert '"asked": "auto"' in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_what_a_number_costs_is_told(data, tmp_path):
    told = []

    class Note(Callback):
        def on_snapshot_cost(self, trainer, entry):
            told.append(entry)

    trainer = build(data, tmp_path / "run", snapshot_every=2, checkpoint_every=1000)
    trainer.callbacks._callbacks += [Note(), Kill(0)]
    trainer.train()
    (entry,) = told
    assert entry["snapshot_cost"]["asked"] == 2 and entry["snapshot_cost"]["percent"] > 1


def test_a_snapshot_that_fails_leaves_the_one_before_and_the_next_are_right(
    data, tmp_path, monkeypatch
):
    """The third one does not fit: the file that it was written to is not the one that is left."""
    calls, seal = [], StateFile.seal

    def fail(self, *arguments):
        calls.append(self.consumer)
        if len(calls) == 3:
            raise OSError("no room")
        return seal(self, *arguments)

    monkeypatch.setattr(StateFile, "seal", fail)
    folder = tmp_path / "run"
    leave(build(data, folder, checkpoint_every=1000), 11)
    trainer = build(data, folder, "auto", checkpoint_every=1000)
    assert trainer.step == 6
    trainer.run_folder.close()
    calls.clear()
    with pytest.warns(UserWarning, match="after step 15 is left out: no room"):
        leave(build(data, folder, "auto", checkpoint_every=1000), 20)
    assert calls[2] == calls[3] != calls[1]  # the one before it stays
    trainer = build(data, folder, "auto", checkpoint_every=1000)
    assert trainer.step == 18
    expected = build(data, tmp_path / "plain", checkpoint_every=1000, snapshot_every=None)
    trainer.train()
    expected.train()
    for name, value in gather_tables(expected.model).items():
        assert torch.equal(value, gather_tables(trainer.model)[name])
