"""What attempts leave for the next one, which end explains the others, and when a run is no longer
started again."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from freescale import Callback, RunConfig, Trainer
from freescale.data.synthetic.generate import generate
from freescale.launch import attempts, restarts
from freescale.launch.attempts import AUTO, KILLED, LOST, STOPPED, Ending, choose_cause, is_repeated
from freescale.launch.ranks import Ended
from freescale.train.metrics_log import truncate_logs
from freescale.transport.local import LocalTransport


def drop_nothing() -> None:
    pass


OWN = Ending("ValueError", "disk full", 7, 3.0, 1)
ENDS = [
    Ending(KILLED, "rank 2 was killed by signal 9", 0, 5.0),
    OWN,
    Ending(STOPPED, "stopped by SIGTERM", 7, 4.0),
    Ending("RemoteError", "rank 1 stopped: disk full", 7, 2.0, 0),
    Ending("TransportError", "a rank died", 8, 1.0, 3),
    Ending(LOST, "nobody left a word", 6, 0.0),
]


def test_the_cause_is_the_end_that_explains_the_others_in_any_order():
    for first in range(len(ENDS)):
        for ends in itertools.permutations(ENDS[first:], min(3, len(ENDS) - first)):
            cause = choose_cause(ends)
            expected = min(ends, key=ENDS.index)
            assert (cause.kind, cause.message) == (expected.kind, expected.message)
            assert cause.step == max(end.step for end in ends)
            assert cause.time == min(end.time for end in ends if end.kind != LOST or len(ends) == 1)


def test_a_crash_of_the_program_is_repeated_and_what_comes_from_outside_is_not():
    assert is_repeated([OWN], OWN) and not is_repeated([], OWN)
    later = Ending("ValueError", "disk full", 8, 9.0, 1)
    assert not is_repeated([OWN], later) and not is_repeated([OWN, later], OWN)
    assert not is_repeated([OWN], Ending("OSError", "disk full", 7, 9.0, 1))
    crash = Ending("SIGSEGV", "rank 0 was killed by signal 11", 7, 1.0)
    assert is_repeated([crash], crash)
    for end in ENDS:
        assert is_repeated([end], end) == (end is OWN)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "histories.parquet"
    return generate(path, users=48, items=40, median=8.0, cap=12, seed=1).path


def train(data: Path, folder: Path | None, *callbacks: Callback, resume="auto", **settings: object):
    given = {"global_batch": 16, "width": 8, "layers": 1, "negatives": 4, "max_length": 12}
    given |= {"data": str(data), "device": "cpu", "epochs": 4, "checkpoint_every": 4}
    given |= {"trace_steps": 0, "log_every": 1, "split": "none"}
    config = RunConfig.from_settings({**given, **settings})
    trainer = Trainer(
        config,
        folder,
        resume=resume,
        callbacks=callbacks,
        histories=data,
        transport=LocalTransport(),
    )
    return trainer.train()


class Fail(Callback):
    """At a step, with the same words each time."""

    def __init__(self, step: int, words: str = "no more memory") -> None:
        self.step, self.words = step, words

    def on_step(self, trainer, step):
        if step.step == self.step:
            raise MemoryError(self.words)


def read_lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_lines(run) if "loss" in line]


def list_restarts(run: Path) -> list[tuple[int, str, int]]:
    return [
        (line["step"], line["restart"]["why"], line["restart"]["repeated_steps"])
        for line in read_lines(run)
        if "restart" in line
    ]


def test_the_same_call_begins_goes_on_and_is_complete(data, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    with pytest.raises(MemoryError):
        train(data, run, Fail(2))  # before the first checkpoint
    with pytest.raises(MemoryError):
        train(data, run, Fail(7))
    assert not train(data, run)["stopped"]
    train(data, whole)
    assert losses(run) == losses(whole) and len(losses(run)) == 12
    # The first one begins anew: its steps are all made again.
    first, second = list_restarts(run)
    assert first[:2] == (0, "MemoryError: rank 0: no more memory") and 2 <= first[2] <= 5
    assert second[:2] == (4, "MemoryError: rank 0: no more memory") and 3 <= second[2] <= 6
    assert not (run / attempts.FOLDER).exists()
    made = losses(run)
    assert train(data, run) == {"stopped": 0} and losses(run) == made
    with pytest.raises(ValueError, match="nothing is left to train"):
        train(data, run, resume=True)


def test_without_a_folder_a_run_begins(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not train(data, None, steps=2)["stopped"]
    assert [path.name for path in (tmp_path / "runs").glob("*/checkpoints/*")] == ["step-00000002"]


def test_what_is_left_of_a_run_after_its_last_step_is_tested(data, tmp_path):
    class Kill(Callback):
        def on_evaluation(self, trainer, metrics, part):
            raise MemoryError("in the test")

    run, settings = tmp_path / "run", {"split": "leave-one-out", "epochs": 1}
    with pytest.raises(MemoryError):
        train(data, run, Kill(), **settings)
    lines = (run / "metrics.jsonl").read_text().splitlines(True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if '"test"' not in line))
    assert train(data, run, **settings)["test"]
    assert "test" in read_lines(run)[-1]
    assert "test" not in train(data, run, **settings)


def test_checkpoints_that_were_given_up_do_not_come_back(data, tmp_path):
    """A run that goes back to an earlier checkpoint and fails before its next one."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = {"checkpoint_every": 2, "keep_checkpoints": 9, "row_lr": 0.001}
    train(data, run, steps=8, checkpoint_every=2, keep_checkpoints=9)
    shutil.copytree(run, whole)
    with pytest.warns(UserWarning, match="after step 4: step-00000006, step-00000008 will be"):
        train(data, whole, resume="4", **settings)
    with pytest.warns(UserWarning), pytest.raises(MemoryError):
        train(data, run, Fail(5), resume="4", **settings)
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == [
        *("step-00000002", "step-00000004")
    ]
    train(data, run, **settings)
    assert losses(run) == losses(whole) and len(losses(run)) == 12
    assert list_restarts(run)[0][0] == 4
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in range(2, 14, 2)]


def test_nothing_is_given_up_before_the_run_goes_on(data, tmp_path):
    """A command that is refused, and a program that only looks, leave checkpoints and logs."""
    run, settings = tmp_path / "run", {"checkpoint_every": 2, "keep_checkpoints": 9}
    train(data, run, steps=6, **settings)
    before = sorted((run / "checkpoints").iterdir()), read_lines(run)
    with pytest.raises(ValueError, match="pass a larger --steps"):
        train(data, run, resume="4", steps=4, **settings)
    assert (sorted((run / "checkpoints").iterdir()), read_lines(run)) == before


def test_an_extended_run_is_tested_again(data, tmp_path):
    """The metrics of the test part before are those of another model."""

    class FailAtEnd(Callback):
        def on_checkpoint(self, trainer, path):
            if trainer.is_complete:
                raise MemoryError("after the last checkpoint")

    def list_tested() -> list[int]:
        return [line["step"] for line in read_lines(run) if "test" in line]

    run, settings = tmp_path / "run", {"split": "leave-one-out"}
    train(data, run, steps=2, **settings)
    with pytest.raises(MemoryError):
        train(data, run, FailAtEnd(), steps=4, **settings)
    assert list_tested() == [2]
    assert train(data, run, steps=4, **settings)["test"] and list_tested() == [2, 4]
    assert "test" not in train(data, run, steps=4, **settings) and list_tested() == [2, 4]


def test_the_same_failure_at_the_same_step_twice_is_not_tried_again(data, tmp_path):
    run = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(MemoryError):
            train(data, run, Fail(6))
    for _ in range(2):  # however often it is asked
        with pytest.raises(ValueError, match="failed twice at step .* no more memory.*--resume"):
            train(data, run)
    assert not train(data, run, resume=True)["stopped"]  # by hand
    assert len(losses(run)) == 12 and len(list_restarts(run)) == 2


def test_other_failures_are_tried_again(data, tmp_path):
    run = tmp_path / "run"
    for words in ("first", "second", "first"):
        with pytest.raises(MemoryError):
            train(data, run, Fail(6, words))
    assert not train(data, run)["stopped"]


def test_a_mistake_of_who_resumes_by_hand_is_no_restart(data, tmp_path):
    run = tmp_path / "run"
    train(data, run)
    with pytest.raises(ValueError, match="nothing is left to train"):
        train(data, run, resume=True)
    train(data, run, resume=True, epochs=5)
    assert list_restarts(run) == []


def test_a_run_whose_ranks_left_no_word(data, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(MemoryError):
        train(data, run, Fail(7))
    (run / attempts.FOLDER / "rank-00000.json").unlink()  # as after kill -9
    train(data, run)
    ((step, why, _),) = list_restarts(run)
    assert step == 4 and why == "all ranks were killed, or their machine was lost"


def scripted(monkeypatch, folder: Path, ends: list[Ended], begun: bool = True) -> list[list[str]]:
    """`run_ranks` that ends as told; returns the commands it was given."""
    calls: list[list[str]] = []

    def run_ranks(arguments, ranks, port, start):
        calls.append(list(arguments))
        if begun:
            folder.mkdir(exist_ok=True)
            attempts.note_begin(folder)
        return ends[len(calls) - 1]

    monkeypatch.setattr(restarts, "run_ranks", run_ranks)
    return calls


KILL, ERROR = Ended((1, -signal.SIGKILL), 0), Ended((0, 1), 0, {0: "freescale: error: no"})
DONE = Ended(None, 0)


@pytest.mark.parametrize(
    ("ends", "begun", "count", "status", "said"),
    [
        ([KILL, KILL, DONE], True, 3, 0, "restart 2 of 2"),
        ([KILL, KILL, KILL], True, 3, 1, "it was the last"),
        ([KILL, KILL, DONE], False, 3, 0, "restart 2 of 2"),
        ([Ended((0, 75), 0)], True, 1, 75, ""),
        ([Ended((0, 75), signal.SIGUSR1)], True, 1, 75, ""),
        ([Ended((0, 75), signal.SIGINT)], True, 1, 130, ""),
        ([ERROR], False, 1, 1, "refused before the run began"),
        ([KILL, ERROR, ERROR], False, 3, 1, "with the same message"),
    ],
)
def test_when_ranks_are_started_again(
    ends, begun, count, status, said, tmp_path, monkeypatch, capsys
):
    calls = scripted(monkeypatch, tmp_path / "run", ends, begun)
    dropped = []  # snapshots, as often as that
    found = restarts.launch_with_restarts(
        ["train"], 2, None, 2, tmp_path / "run", None, lambda: dropped.append(True)
    )
    assert (len(calls), found) == (count, status) and said in capsys.readouterr().err
    assert dropped == [True] * (status == 1)
    assert calls[0] == ["train"] and all(
        call == ["train", "--resume", "auto"] for call in calls[1:]
    )


def test_a_run_is_started_again_whichever_signal_has_killed_a_rank(tmp_path, monkeypatch, capsys):
    """Most real-time signals have no name."""
    for number in range(1, signal.NSIG):
        run = tmp_path / str(number)
        calls = scripted(monkeypatch, run, 2 * [Ended((1, -number), 0)])
        assert restarts.launch_with_restarts(["train"], 2, None, 1, run, None, drop_nothing) == 1
        assert f"rank 1 was killed by signal {number}" in capsys.readouterr().err
        (ending,) = attempts.read_endings(run)
        assert len(calls) == 2 and choose_cause([ending, OWN]).kind == ending.kind


def test_a_clock_that_is_set_back_does_not_keep_a_run_from_being_started_again(
    tmp_path, monkeypatch
):
    """The ranks begin, by their clock, an hour before the launcher started them."""
    calls = scripted(monkeypatch, tmp_path / "run", [ERROR, DONE])
    late = SimpleNamespace(time=lambda: time.time() - 3600)
    monkeypatch.setattr(attempts, "time", late)
    assert (
        restarts.launch_with_restarts(["train"], 2, None, 2, tmp_path / "run", None, drop_nothing)
        == 0
    )
    assert len(calls) == 2


def test_a_run_that_is_refused_is_not_started_again_though_an_attempt_has_begun_before(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "run").mkdir()
    attempts.note_begin(tmp_path / "run")
    calls = scripted(monkeypatch, tmp_path / "run", [ERROR], begun=False)
    assert (
        restarts.launch_with_restarts(["train"], 2, None, 2, tmp_path / "run", AUTO, drop_nothing)
        == 1
    )
    assert len(calls) == 1 and "refused before the run began" in capsys.readouterr().err


def test_logs_that_are_cut_keep_the_restarts(tmp_path):
    """A run may go back further than to where it went on the last time: a checkpoint is damaged."""
    entry = attempts.describe_restart(OWN, 100, 9.0)
    lines = [{"step": 80, "loss": 1.0}, entry, {"step": 120, "loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    truncate_logs(tmp_path, 80)
    assert read_lines(tmp_path) == lines[:2] and attempts.read_restarts(tmp_path) == [entry]


def test_a_failure_before_the_first_step_counts(data, tmp_path):
    run = tmp_path / "run"
    train(data, run, steps=4)
    for words in ("checkpoint", "checkpoint", "failed twice at step 4 with ValueError"):
        with pytest.raises(ValueError, match=words) as caught:
            train(data, run, width=16)
        assert "item" in str(caught.value)  # the table that differs
