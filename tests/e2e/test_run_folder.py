"""A run's folder is its own: no two runs share one, a live one is refused, and what a dead one left
does not stand in the way."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import time
from datetime import datetime
from pathlib import Path

import pytest
from helpers.command import Begun, freescale, wait_for
from helpers.ranks import CONTEXT, gather_ranks

from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from freescale.data.synthetic.generate import generate
from freescale.train import run_folder as module
from freescale.train.run_folder import RunFolder
from freescale.train.trainer import Trainer
from freescale.transport.local import LocalTransport

SMALL = [
    "--device",
    "cpu",
    "--global-batch",
    16,
    "--width",
    8,
    "--layers",
    1,
    "--negatives",
    8,
    "--max-length",
    20,
]
SMALL += ["--log-every", 1]


class Noon:
    @staticmethod
    def now() -> datetime:
        return datetime(2026, 1, 1, 12)


def test_runs_of_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "datetime", Noon)
    runs = [RunFolder(None, False, LocalTransport()) for _ in range(3)]
    assert not Path("runs").exists(), "a run that never began leaves no folder"
    for place, run in enumerate(runs):
        run.open(f'{{"lr": {place}}}')
    assert [str(run.path) for run in runs] == [
        f"runs/2026-01-01-120000{end}" for end in ("", "-2", "-3")
    ]
    assert [json.loads((run.path / "config.json").read_text())["lr"] for run in runs] == [0, 1, 2]


def test_a_run_that_begins_while_another_of_its_second_has_saved(tmp_path, monkeypatch):
    """What lies in the folder that it would have had is none of its business."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "datetime", Noon)
    data = tmp_path / "data.parquet"
    generate(data, users=60, items=40, median=8.0, cap=12, seed=1)
    settings = TrainConfig(global_batch=8, steps=2, trace_steps=0)
    config = RunConfig(
        DataConfig(data=str(data), max_length=10, negatives=4),
        ModelConfig(width=8, layers=1, heads=1),
        settings,
    )
    for end in ("", "-2"):
        run = Trainer(config, histories=data, transport=LocalTransport())
        run.train()
        assert run.folder == Path(f"runs/2026-01-01-120000{end}") and run.checkpoints.steps() == [2]


def test_a_folder_in_use_is_refused_on_all_ranks(tmp_path):
    holder = RunFolder(tmp_path / "run", False, LocalTransport())
    holder.open("{}")
    for resume in (False, True):
        (holder.path / "checkpoints" / "step-00000002").mkdir(parents=True, exist_ok=True)
        (holder.path / "checkpoints" / "step-00000002" / "state.json").touch()
        for error, _ in gather_ranks(2, _asked_for, holder.path, resume):
            assert (
                error is not None
                and f"is in use by another run (process {os.getpid()} on " in error
            )
    holder.close()
    assert RunFolder(holder.path, True, LocalTransport()).path == holder.path
    with pytest.raises(
        ValueError, match=("already holds a run: name another folder, or pass --resume")
    ):
        RunFolder(holder.path, False, LocalTransport())


def _asked_for(transport, folder: Path, resume: bool) -> None:
    RunFolder(folder, resume, transport)


def test_of_two_that_ask_at_once_one_is_refused(tmp_path):
    """Neither is there when they look; the second to begin is refused, and spoils nothing."""
    first, second = (RunFolder(tmp_path / "run", False, LocalTransport()) for _ in range(2))
    first.open('{"which": 1}')
    with pytest.raises(ValueError, match="in use by another run"):
        second.open('{"which": 2}')
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"which": 1}


def test_a_killed_run_holds_nothing(tmp_path):
    process = CONTEXT.Process(target=_hold, args=(tmp_path / "run",))
    process.start()
    wait_for((tmp_path / "run" / "config.json").exists)
    with pytest.raises(ValueError, match=f"in use by another run .process {process.pid} on "):
        RunFolder(tmp_path / "run", False, LocalTransport())
    process.kill()
    process.join()
    RunFolder(tmp_path / "run", False, LocalTransport()).open("{}")


def _hold(path: Path) -> None:
    held = RunFolder(path, False, LocalTransport())
    held.open("{}")
    time.sleep(60)


def test_what_a_dead_run_left_is_put_aside(tmp_path):
    run = tmp_path / "run"
    for place, aside in enumerate(("ended", "ended-2")):
        (run / "tensorboard").mkdir(parents=True, exist_ok=True)
        (run / "config.json").write_text(f'{{"lr": {place}}}')
        (run / "metrics.jsonl").write_text(f'{{"step": {place}}}\n')
        (run / "notes.txt").write_text("mine")
        opened = RunFolder(run, False, LocalTransport())
        opened.open("{}")
        opened.close()
        assert opened.notes == [
            f"moved an earlier run, which ended before its first checkpoint, to {run / aside}"
        ]
        assert {path.name for path in (run / aside).iterdir()} == {
            "config.json",
            "metrics.jsonl",
            "tensorboard",
        }
        assert json.loads((run / aside / "config.json").read_text()) == {"lr": place}
        assert (
            (run / "config.json").read_text() == "{}"
            and not (run / "metrics.jsonl").exists()
            and (run / "notes.txt").exists()
        )


def test_a_refused_run_leaves_the_folder_as_it_was(tmp_path):
    """Looked at, not opened: nothing is moved, no lock is left in a folder that had none."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    RunFolder(tmp_path / "run", False, LocalTransport())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]


def test_nothing_to_resume_says_what_to_do(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(
        ValueError,
        match=("holds no checkpoint, .* start it again with the same command, without --resume"),
    ):
        RunFolder(tmp_path / "run", True, LocalTransport())
    assert not list((tmp_path / "run").iterdir())


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def none_here(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none_here)
    opened = RunFolder(tmp_path / "run", False, LocalTransport())
    opened.open("{}")
    assert opened.notes == [
        (
            f"{tmp_path / 'run'} cannot be locked, because its file system has no locks: "
            "make sure that no other run uses it"
        )
    ]


def test_a_killed_run_has_a_page_and_is_started_again(tmp_path):
    """By the same command. While a run holds the folder, what only reads it works."""
    data, run = tmp_path / "histories.parquet", tmp_path / "run"
    generate(data, users=96, items=200, median=12, cap=20, global_batch=16)
    command = [
        "train",
        "--data",
        data,
        "--folder",
        run,
        *SMALL,
        "--epochs",
        100_000,
        "--checkpoint-every",
        100_000,
    ]
    with Begun(*command) as begun:
        wait_for((run / "metrics.jsonl").exists)
        refused = freescale(*command)
        assert refused.returncode == 1 and "in use by another run" in refused.stderr
        os.kill(begun.pid, signal.SIGKILL)
        assert begun.ended().returncode == -signal.SIGKILL
    told = freescale("train", "--folder", run, "--resume")
    assert told.returncode == 1 and "start it again with the same command" in told.stderr
    page = tmp_path / "report.html"
    done = freescale("report", run, "--out", page)
    assert done.returncode == 0, done.stderr
    assert (
        "before its first figures" in page.read_text() or "the run did not end" in page.read_text()
    )
    again = freescale(*command, "--steps", 3)
    assert again.returncode == 0 and f"to {run / 'ended'}" in again.stdout, again.stderr
    assert [
        json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3, 3]
    with module.lock_folder(run):  # as a run that goes on would
        for reading in (
            ["eval", run],
            ["export", run, "--out", tmp_path / "out"],
            ["report", run, "--out", page],
        ):
            done = freescale(*reading)
            assert done.returncode == 0, done.stderr
