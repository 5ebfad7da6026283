"""`--restarts` and `--resume auto`: a run that is killed goes on by itself, and ends as if nothing
had been."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from pathlib import Path

import pytest
from faults.proof import compare_states, read_final_state
from helpers.command import Begun, freescale, wait_for

from freescale.data.synthetic.generate import generate

SMALL = ["--device", "cpu", "--global-batch", 16, "--width", 8, "--layers", 1, "--negatives", 8]
SMALL += ["--max-length", 20, "--split", "none", "--log-every", 1, "--placement", "sharded"]
SMALL += ["--epochs", 1000, "--checkpoint-every", 20]


@pytest.fixture
def arguments(tmp_path) -> list[object]:
    data = tmp_path / "histories.parquet"
    generate(data, users=96, items=200, median=12, cap=20, global_batch=16)
    return ["train", "--data", data, *SMALL]


def read_lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_lines(run) if "loss" in line]


def test_a_killed_rank_is_started_again_and_the_run_ends_as_if_nothing_had_been(
    arguments, tmp_path
):
    run, whole, steps = tmp_path / "run", tmp_path / "whole", ["--nproc", 2, "--steps", 70]
    command = [*arguments, "--folder", run, *steps, "--restarts", 2, "--resume", "auto"]
    with Begun(*command) as begun:
        wait_for(lambda: any((run / "checkpoints").glob("step-*")))
        os.kill(begun.ranks()[1], signal.SIGKILL)
        done = begun.ended()
    assert done.returncode == 0, done.stderr
    assert "rank 1 was killed by signal 9; starting all ranks again, restart 1 of 2" in done.stderr
    (entry,) = [line for line in read_lines(run) if "restart" in line]
    restart = entry["restart"]
    assert restart["why"] == "rank 1 was killed by signal 9" and restart["seconds"] > 0
    assert (
        entry["step"] >= 20
        and restart["repeated_steps"] == restart["ending"]["step"] - entry["step"] >= 0
    )
    assert json.loads((run / "ledger.json").read_text())["restarts"] == [entry]
    assert "restarted: rank 1 was killed by signal 9" in done.stdout
    assert freescale(*arguments, "--folder", whole, *steps).returncode == 0
    assert losses(run) == losses(whole) and len(losses(run)) == 70
    assert not (run / ".attempt").exists()


def test_forked_ranks_end_with_the_bits_of_the_undisturbed_run(arguments, tmp_path):
    """Killed, started again by a fork, killed once more. With one thread: the processes of `Begun`
    have as many as they are told, others only as many as MKL allows."""
    run, whole, steps = tmp_path / "run", tmp_path / "whole", ["--nproc", 2, "--steps", 200]
    command, one = [*arguments, "--folder", run, *steps, "--restarts", 2], {"OMP_NUM_THREADS": "1"}
    with Begun(*command, module="helpers.patient_restarts", **one) as begun:
        for restarts in range(2):
            wait_for(lambda n=restarts: count(run, "restart") == n and count(run, "loss") > 20)
            made = count(run, "loss")
            wait_for(lambda n=made: count(run, "loss") > n)
            last = begun.ranks()[(1, -1)[restarts]]  # what ranks are forked from is between
            os.kill(last, signal.SIGKILL)
        done = begun.ended()
    assert done.returncode == 0, done.stderr
    assert "restart 2 of 2" in done.stderr and "as new processes" not in done.stderr
    assert freescale(*arguments, "--folder", whole, *steps, **one).returncode == 0
    assert losses(run) == losses(whole) and len(losses(run)) == 200
    states = [read_final_state(folder, tmp_path / "said") for folder in (run, whole)]
    assert compare_states(*states)["differing_tensors"] == []


def count(run: Path, kind: str) -> int:
    """Lines of a run whose log may be cut at this moment."""
    try:
        return sum(kind in line for line in read_lines(run))
    except (OSError, ValueError):
        return 0


def test_ranks_save_and_end_when_their_launcher_is_killed(arguments, tmp_path):
    run = tmp_path / "run"
    with Begun(*arguments, "--folder", run, "--nproc", 2, "--checkpoint-every", 100_000) as begun:
        wait_for((run / "metrics.jsonl").exists)
        ranks = begun.ranks()
        os.kill(begun.pid, signal.SIGKILL)
        assert begun.ended().returncode == -signal.SIGKILL
        wait_for(lambda: not any(is_alive(rank) for rank in ranks))
    (saved,) = (run / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) == losses(run)[-1][0]
    with open(run / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free for the next attempt


def is_alive(process: int) -> bool:
    """Neither gone nor a zombie that nobody waits for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
