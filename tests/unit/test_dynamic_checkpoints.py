"""Checkpoints, snapshots and exports of dynamic tables: each is the state after its step, whatever
was decided for the steps to come, and what is resumed trains the bits of an undisturbed run."""

from __future__ import annotations

import pytest
import torch
from helpers.collisions import batch_of, bits
from helpers.dynamic_streams import CHURN, RULES, build, state_of
from helpers.snapshots import TakenSnapshots

import freescale
from freescale.pipeline.single import Single
from freescale.pipeline.staged import Staged
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.contents import CONSUMER, follow_changes
from freescale.train.state.overview import compact_last
from freescale.transport.local import LocalTransport

ALONE = LocalTransport()
BATCHES = [batch_of(ids, number) for number, ids in enumerate(CHURN)]


@pytest.fixture(scope="module")
def states():
    """By rules: (loss, state) after each step of the serial schedule."""
    found = []
    for rules in RULES:
        parallel, pipeline = build(ALONE, "serial", rules, optimizer="adam")
        found.append([(r.loss, state_of(parallel)) for r in pipeline.run(BATCHES)])
    return found


def assert_state(parallel, expected):
    actual = state_of(parallel)
    assert [n for n, value in expected.items() if not torch.equal(actual[n], value)] == []


@pytest.mark.parametrize(
    ("schedule", "ahead", "asynchronous", "number"),
    [
        (Staged, False, False, 0),
        (Staged, False, True, 2),
        (Staged, False, True, 3),
        ("staged", True, True, 1),
    ],
)
def test_saved_after_every_step_and_resumed(
    schedule, ahead, asynchronous, number, states, tmp_path, monkeypatch
):
    """Full and differential. Each is that of serial; runs end at various steps and go on. `ahead`:
    a single rank as on a GPU, where rows are made beside the compute."""
    monkeypatch.setattr(Single, "_ahead", ahead)
    rules, progress = RULES[number], None
    for until in (1, 6, len(CHURN)):
        parallel, pipeline = build(ALONE, schedule, rules, optimizer="adam")
        checkpoints = Checkpoints(tmp_path, ALONE, keep=99, full_every=4, asynchronous=asynchronous)
        if progress is not None:
            progress = checkpoints.load(checkpoints.latest(), parallel, pipeline.optimizer)
            pipeline.load_state_dict(progress["pipeline"])
        for result in pipeline.run(BATCHES[pipeline.steps :]):
            assert result.loss == states[number][result.step - 1][0]
            progress = {"step": result.step, "pipeline": pipeline.state_dict()}
            checkpoints.save(parallel, pipeline.optimizer, progress)
            if result.step == until:
                break
        checkpoints.wait()
    for step in (1, 2, 3, 7, 9, 11, 12, 14):
        restored, _ = build(ALONE, "serial", rules, optimizer="adam")
        checkpoints.load(checkpoints.path(step), restored)
        assert_state(restored, states[number][step - 1][1])


def test_going_back_to_a_checkpoint_within_a_run(tmp_path, monkeypatch):
    """The tables are replaced while rows of the next batch are decided on."""
    found = []
    for schedule, ahead in (("serial", False), (Staged, False), ("staged", True)):
        monkeypatch.setattr(Single, "_ahead", ahead)
        parallel, pipeline = build(ALONE, schedule, RULES[2], optimizer="adam")
        checkpoints, losses = Checkpoints(tmp_path / f"{schedule}", ALONE), []
        for result in pipeline.run(BATCHES):
            losses.append(result.loss)
            if result.step == 4:
                checkpoints.save(parallel, pipeline.optimizer, {"step": 4})
            if result.step == 7:
                checkpoints.load(checkpoints.path(4), parallel, pipeline.optimizer)
        pipeline.close()
        found.append((losses, state_of(parallel)))
    for losses, state in found[1:]:
        assert losses == found[0][0]
        assert [n for n, value in found[0][1].items() if not torch.equal(state[n], value)] == []


def test_snapshots_hold_the_last_step_and_changes_since_one(states):
    for number, rules in list(enumerate(RULES))[2:]:
        parallel, pipeline = build(ALONE, Staged, rules, optimizer="adam")
        taken = TakenSnapshots()
        for result in pipeline.run(BATCHES[:8]):
            if result.step in (3, 5, 6):
                taken.take(parallel, pipeline.optimizer, result.step)
        for tensors in (taken.copied, taken.own):
            restored, other = build(ALONE, "serial", rules, optimizer="adam")
            restored.tables.place()
            follow_changes(restored.tables, CONSUMER)
            list(other.run(BATCHES[-1:]))  # something else is there
            taken.load(tensors, restored, other.optimizer)
            assert_state(restored, states[number][5][1])


def test_export_has_the_ids_that_have_a_row(states, tmp_path):
    from safetensors.torch import load_file

    parallel, pipeline = build(ALONE, Staged, RULES[1], optimizer="adam")
    checkpoints = Checkpoints(tmp_path / "run", ALONE, keep=9, full_every=3)
    for result in pipeline.run(BATCHES[:5]):
        checkpoints.save(parallel, pipeline.optimizer, {"step": result.step})
    expected = states[1][4][1]
    for name in ("delta", "compacted"):
        freescale.export(checkpoints.latest(), tmp_path / name)
        table = load_file(tmp_path / name / "table.item.safetensors")
        assert torch.equal(table["ids"], expected["item/ids"])
        assert torch.equal(bits(table["weight"]), expected["item/rows"])
        compact_last(tmp_path / "run")
    restored, other = build(ALONE, "serial", RULES[1], optimizer="adam")
    checkpoints.load(checkpoints.latest(), restored, other.optimizer)
    assert_state(restored, expected)


def test_another_kind_of_table_is_refused(tmp_path):
    parallel, pipeline = build(ALONE, "serial", RULES[0])
    list(pipeline.run(BATCHES[:1]))
    checkpoints = Checkpoints(tmp_path, ALONE)
    path = checkpoints.save(parallel, pipeline.optimizer, {"step": 1})
    for rules in (None, RULES[1], RULES[3]):
        other, _ = build(ALONE, "serial", rules)
        with pytest.raises(ValueError, match="table 'item' is"):
            checkpoints.load(path, other)
