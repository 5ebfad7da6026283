"""Deltas: restored from a full checkpoint and its deltas, a run has the bits of one that was saved
in full, on any number of ranks; a chain with a wrong link is refused by name."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from helpers.checkpoints import batches, build
from helpers.ranks import run_ranks
from helpers.training import snapshot

from freescale.embedding.lease import Capture
from freescale.train.export import export_checkpoint
from freescale.train.state import copies as module
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.disk import Damaged
from freescale.train.torch_files import tensor_writer as errors
from freescale.transport.local import LocalTransport

STEPS = 6
MIXED = {"item": "sharded", "action": "replicated"}


def save_all(transport, folder, asynchronous=False, placement=MIXED, steps=STEPS):
    """The same run twice: each step in full, and as one of a chain of four. Returns the threads
    that copied the chain's rows beside training."""
    module.Capture = NotedCapture
    for kind, options in {"full": {}, "chain": {"full_every": 4}}.items():
        parallel, dense, pipeline = build(transport, placement=placement)
        options |= {"asynchronous": asynchronous and kind == "chain", "keep": 99}
        saved = Checkpoints(Path(folder) / kind, transport, **options)
        for result in pipeline.run(batches(transport, 0, steps)):
            progress = {"step": result.step, "pipeline": pipeline.state_dict()}
            saved.save(parallel, dense, progress)
        saved.wait()
    if asynchronous:
        refuse_on_all_ranks(transport, saved, parallel, dense)
    return NotedCapture.threads


class NotedCapture(Capture):
    threads: ClassVar[list[str]] = []

    def make(self):
        self.threads.append(threading.current_thread().name)
        time.sleep(0.05)  # the backward of the next step is through: its update has to wait
        super().make()


def refuse_on_all_ranks(transport, chain, parallel, dense):
    """The last rank cannot write: all hear of it where they wait."""
    write = errors.FileSystemWriter.write_data

    def fail(self, *arguments):
        if transport.rank == transport.world - 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *arguments)

    errors.FileSystemWriter.write_data = fail
    chain.save(parallel, dense, {"step": STEPS + 1})
    with pytest.raises(ValueError, match="the disk is full"):
        chain.wait()


def restore(transport, folder, step, placement=MIXED):
    """The tables, weights and optimizer of a step; and of the next one."""
    parallel, dense, pipeline = build(transport, placement=placement)
    checkpoints = Checkpoints(Path(folder), transport, keep=99, full_every=4)
    path = checkpoints.path(step)
    progress = checkpoints.load(path, parallel, dense)
    pipeline.load_state_dict(progress["pipeline"])
    found = snapshot(parallel) | collect_optimizer(parallel, dense)
    list(pipeline.run(batches(transport, step, step + 1)))
    return found, snapshot(parallel)


def collect_optimizer(parallel, dense):
    return {
        f"{name}/{key}": torch.as_tensor(value).clone()
        for name, parameter in parallel.module.named_parameters()
        for key, value in dense.state[parameter].items()
    }


def assert_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert torch.equal(one[name], value), name


def read_state(path):
    return json.loads((path / "state.json").read_text())


def list_kinds(folder):
    return [(read_state(path).get("parent") or {}).get("step") for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_all(LocalTransport(), folder)
    return folder


def copied(saved, tmp_path):
    shutil.copytree(saved / "chain", tmp_path / "chain")
    return tmp_path / "chain"


def test_every_fourth_is_full_and_the_others_hold_the_rows_that_changed(saved):
    assert list_kinds(saved / "chain") == [None, 1, 2, 3, None, 5]
    state = read_state(saved / "chain" / "step-00000003")
    (spans,) = state["changed"]
    read = batches(LocalTransport(), 2, 3)[0]
    ids = torch.cat([read.values("history"), read.dense["extra"].reshape(-1)])
    assert spans["item"][0] == ids.unique().numel() < 200


@pytest.mark.parametrize("step", [1, 4, 6])
def test_a_chain_restores_the_bits_of_a_full_checkpoint(saved, step):
    transport = LocalTransport()
    expected = restore(transport, saved / "full", step)
    assert_equal(restore(transport, saved / "chain", step), expected)


def restore_both(transport, folders, step):
    other = {"item": "sharded", "action": "sharded"}
    return [
        [restore(transport, Path(folder) / kind, step, other) for kind in ("full", "chain")]
        for folder in folders
    ]


def test_chains_are_restored_on_other_ranks_and_placements(saved, tmp_path):
    """1 to 2, 2 to 2, written beside training; and 2 to 1."""
    threads = run_ranks(2, save_all, str(tmp_path), True)[0]
    # beside the step that follows; the last one when the run ends
    assert threads[:6] == ["freescale ahead"] * 5 + ["MainThread"]
    assert list_kinds(tmp_path / "chain") == [None, 1, 2, 3, None, 5]
    for found in run_ranks(2, restore_both, [str(saved), str(tmp_path)], 4):
        for full, chain in found:
            assert_equal(chain, full)
    ((full, chain),) = restore_both(LocalTransport(), [tmp_path], 4)
    assert_equal(chain, full)


def test_a_chain_is_exported(saved, tmp_path):
    from safetensors.torch import load_file

    found = {}
    for kind in ("full", "chain"):
        files = export_checkpoint(saved / kind / "step-00000004", tmp_path / kind)
        found[kind] = [load_file(path) for path in files]
    assert_equal(found["chain"], found["full"])


def test_a_resumed_run_goes_on_with_its_chain(saved, tmp_path):
    """And turning back leaves the later ones behind."""
    folder, transport = copied(saved, tmp_path), LocalTransport()
    parallel, dense, pipeline = build(transport, placement=MIXED)
    checkpoints = Checkpoints(folder, transport, keep=2, full_every=4)
    with pytest.warns(UserWarning, match="step-00000003.* given up"):
        progress = checkpoints.load(folder / "step-00000002", parallel, dense)
    pipeline.load_state_dict(progress["pipeline"])
    for result in pipeline.run(batches(transport, 2, 6)):
        checkpoints.save(parallel, dense, {"step": result.step, "pipeline": pipeline.state_dict()})
    assert checkpoints.steps() == [5, 6]
    assert list_kinds(folder) == [None, 5]
    assert_equal(restore(transport, folder, 6), restore(transport, saved / "full", 6))


def test_rows_that_a_load_replaced_are_no_small_change(saved, tmp_path):
    """A model that has loaded something else is saved in full, and other folders' deltas hold all
    rows."""
    transport = LocalTransport()
    parallel, dense, pipeline = build(transport, placement=MIXED)
    one, two = (
        Checkpoints(tmp_path / name, transport, full_every=4, keep=9) for name in ("one", "two")
    )
    list(pipeline.run(batches(transport, 0, 1)))
    for checkpoints in (one, two):
        checkpoints.save(parallel, dense, {"step": 1, "pipeline": pipeline.state_dict()})
    two.load(saved / "full" / "step-00000005", parallel)
    for checkpoints in (one, two):
        checkpoints.save(parallel, dense, {"step": 5, "pipeline": pipeline.state_dict()})
    assert list_kinds(tmp_path / "one") == [None, 1] and list_kinds(tmp_path / "two") == [None] * 2
    expected = restore(transport, tmp_path / "two", 5)
    assert_equal(restore(transport, tmp_path / "one", 5), expected)


# ---- wrong links


def take_last(folder):
    found = Checkpoints(folder, LocalTransport()).last_intact()
    return found and found.path.name


def test_a_damaged_delta_and_a_damaged_full_one(saved, tmp_path):
    folder = copied(saved, tmp_path)
    shutil.rmtree(folder / "step-00000006")
    shutil.rmtree(folder / "step-00000005")
    file = next((folder / "step-00000003").glob("__0_*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.warns(UserWarning, match=r"step-00000004 depends on .*step-00000003/__0_"):
        assert take_last(folder) == "step-00000002"
    (folder / "step-00000001" / "state.json").unlink()
    with pytest.warns(UserWarning), pytest.raises(Damaged, match="step-00000001, which is not"):
        take_last(folder)


def test_a_delta_of_another_run_is_refused(saved, tmp_path):
    folder = copied(saved, tmp_path)
    save_all(LocalTransport(), tmp_path / "other", placement="sharded", steps=2)
    for step in (3, 4, 5, 6):
        shutil.rmtree(folder / f"step-{step:08d}")
    shutil.rmtree(folder / "step-00000002")
    shutil.copytree(tmp_path / "other" / "chain" / "step-00000002", folder / "step-00000002")
    with pytest.warns(UserWarning, match="another step-00000001 than the one next to it"):
        assert take_last(folder) == "step-00000001"


def test_a_delta_under_another_step_is_refused(saved, tmp_path):
    folder = copied(saved, tmp_path)
    (folder / "step-00000006").rename(folder / "step-00000009")
    with pytest.warns(UserWarning, match="step-00000009 holds a checkpoint of step 6"):
        assert take_last(folder) == "step-00000005"


def test_a_parent_that_has_gone_makes_the_next_one_full(saved, tmp_path):
    transport = LocalTransport()
    parallel, dense, pipeline = build(transport)
    checkpoints = Checkpoints(tmp_path, transport, full_every=9)
    for result in pipeline.run(batches(transport, 0, 2)):
        checkpoints.save(parallel, dense, {"step": result.step})
        shutil.rmtree(tmp_path / f"step-{result.step:08d}")
    checkpoints.save(parallel, dense, {"step": 3})
    assert list_kinds(tmp_path) == [None]


# ---- the command


def invoke(*arguments):
    from click.testing import CliRunner

    from freescale.cli.main import main

    return CliRunner().invoke(main, ["checkpoints", *map(str, arguments)])


def test_the_command_lists_verifies_and_compacts(saved, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved / "chain", run / "checkpoints")
    for step in (5, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    listed = invoke(run)
    assert listed.exit_code == 0, listed.output
    kinds = [" ".join(line.split()[:4]) for line in listed.stdout.splitlines()[2:5]]
    assert kinds == ["2 delta since 1", "3 delta since 2", "4 delta since 3"]

    expected = restore(LocalTransport(), saved / "full", 4)
    compacted = invoke(run, "--compact", "--verify")
    assert compacted.exit_code == 0, compacted.output
    assert "removed 1, 2, 3" in compacted.stdout and "as they were written" in compacted.stdout
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000004"]
    assert_equal(restore(LocalTransport(), run / "checkpoints", 4), expected)
    assert "removed" not in invoke(run, "--compact").stdout

    file = next((run / "checkpoints" / "step-00000004").glob("__0_*"))
    file.write_bytes(file.read_bytes()[:-1])
    damaged = invoke(run, "--verify")
    assert damaged.exit_code == 1 and f"{file.name} is damaged" in damaged.stderr
    assert "DAMAGED" in damaged.stdout
    assert "no checkpoint" in invoke(tmp_path).stderr
