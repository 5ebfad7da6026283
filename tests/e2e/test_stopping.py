"""SIGTERM, SIGUSR1 and Ctrl-C: a run that can save does, on all ranks, and goes on later as
if nothing had been; survivors of a failure save nothing, and end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.command import Begun, freescale, torchrun, wait_for
from helpers.ranks import CONTEXT, gather_ranks

from freescale.data.synthetic.generate import generate
from freescale.launch import signals
from freescale.launch.signals import REQUEUE, StopSignals
from freescale.train.commands import resume_command

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
SMALL += ["--split", "none", "--log-every", 1]
ENDLESS = ["--epochs", 100_000, "--checkpoint-every", 100_000]


@pytest.fixture
def arguments(tmp_path) -> list[object]:
    data = tmp_path / "histories.parquet"
    generate(data, users=96, items=200, median=12, cap=20, global_batch=16)
    return ["train", "--data", data, *SMALL, *ENDLESS]


def losses(run: Path) -> list[tuple[int, float]]:
    return [
        (line["step"], line["loss"])
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "loss" in line
    ]


def stepped(run: Path) -> None:
    wait_for(
        lambda: (
            (run / "metrics.jsonl").exists()
            and (run / "metrics.jsonl").read_bytes().count(b"\n") >= 3
        )
    )


def saved(run: Path) -> int:
    """The step of the only checkpoint, in which the metrics and the ledger end too."""
    (path,) = (run / "checkpoints").iterdir()
    step = int(path.name.removeprefix("step-"))
    assert json.loads((run / "ledger.json").read_text())["steps"] == step == losses(run)[-1][0]
    return step


def test_a_process_that_gets_sigusr1_saves_and_goes_on(arguments, tmp_path):
    run = tmp_path / "a run"
    with Begun(*arguments, "--folder", run) as begun:
        stepped(run)
        os.kill(begun.pid, signal.SIGUSR1)
        done = begun.ended()
    assert done.returncode == REQUEUE, done.stderr
    assert "stopping: the run is saved after this step" in done.stderr
    assert f"go on with: freescale train --folder '{run}' --resume" in done.stdout
    step = saved(run)
    assert freescale("train", "--folder", run, "--resume", "--steps", step + 3).returncode == 0
    assert (
        freescale(*arguments, "--folder", tmp_path / "whole", "--steps", step + 3).returncode == 0
    )
    assert losses(run) == losses(tmp_path / "whole")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    (entry,) = [line for line in lines if "restart" in line]
    assert entry["step"] == step and entry["restart"]["why"] == "stopped by SIGUSR1"
    assert entry["restart"]["repeated_steps"] == 0


@pytest.mark.parametrize("who", ["the launcher", "one rank", "a terminal"])
def test_all_ranks_save_after_the_same_step(who, arguments, tmp_path):
    run = tmp_path / "run"
    with Begun(*arguments, "--folder", run, "--nproc", 2, "--placement", "sharded") as begun:
        stepped(run)
        ranks = begun.ranks()
        number = signal.SIGINT if who == "a terminal" else signal.SIGTERM
        # A terminal sends Ctrl-C to all of them; the launcher's passes it on, and it does not count
        # twice.
        for process in {
            "the launcher": [begun.pid],
            "one rank": ranks[1:],
            "a terminal": [begun.pid, *ranks],
        }[who]:
            os.kill(process, number)
        done = begun.ended()
    assert done.returncode == (130 if who == "a terminal" else REQUEUE), done.stderr
    assert "Traceback" not in done.stderr and "failed" not in done.stderr
    assert (
        f"stopped after step {saved(run)}, saved in " in done.stdout
        and f"--folder {run} --resume --nproc 2" in done.stdout
    )
    again = freescale("train", "--folder", run, "--resume", "--nproc", 2, "--steps", saved(run) + 1)
    assert again.returncode == 0, again.stderr


def test_a_second_ctrl_c_ends_ranks_that_do_not_answer(arguments, tmp_path):
    run = tmp_path / "run"
    with Begun(*arguments, "--folder", run, "--nproc", 2) as begun:
        stepped(run)
        ranks = begun.ranks()
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        os.kill(begun.pid, signal.SIGINT)
        time.sleep(signals.SAME_PRESS + 0.2)
        os.kill(begun.pid, signal.SIGINT)
        done = begun.ended(timeout=120)
    assert done.returncode == 128 + signal.SIGINT and "freescale: interrupted" in done.stderr
    assert (
        all(not Path(f"/proc/{rank}").exists() for rank in ranks)
        and not (run / "checkpoints").exists()
    )


@pytest.mark.long
def test_survivors_of_a_failure_under_torchrun_save_nothing(arguments, tmp_path):
    """They get SIGTERM, as from a cluster that wants the machine back, but have no agreement with
    the rank that is gone."""
    run = tmp_path / "run"
    given = ["-m", "freescale", *arguments, "--folder", run, "--placement", "sharded"]
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "170"}  # else it kills after 30 s
    with torchrun("--standalone", "--nproc-per-node", 2, *given, **patience) as begun:
        stepped(run)
        ranks = begun.ranks()
        assert len(ranks) == 2
        begin = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        done = begun.ended(180)
    assert time.monotonic() - begin < signals.SILENCE + 90  # a busy machine is slow to end
    assert done.returncode != 0 and "died or fell silent" in done.stderr, done.stderr
    assert not (run / "checkpoints").exists() and not (run / "ledger.json").exists()


def test_a_rank_that_waits_for_a_silent_peer_ends_within_its_limit(tmp_path):
    """The peer is alive and says nothing: the main thread waits in gloo, where no handler of
    Python's interrupts it."""
    said = tmp_path / "said"
    assert gather_ranks(2, _wait_for_a_silent_peer, said, lost=[0]) == [
        ("lost", None),
        (None, None),
    ]
    assert (
        "freescale: ended without saving: SIGTERM came, and for 1 s no step was complete"
        in said.read_text()
    )


def _wait_for_a_silent_peer(transport, said: Path) -> None:
    if transport.rank == 1:
        return wait_for(lambda: said.exists() and "without saving" in said.read_text())
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    signals.SILENCE = 1.0
    with StopSignals(lambda: None, 0):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        transport.gather_bytes(b"")
    return None


def test_one_press_is_heard_once_and_what_was_before_comes_back():
    before, calls = signal.getsignal(signal.SIGINT), []
    with StopSignals(lambda: calls.append(1), 0) as heard:
        # of a terminal, of a launcher that passes it on
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        wait_for(lambda: bool(calls))
    assert calls == [1] and heard.number == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before


def status_of(function: Callable[..., None], *arguments: object) -> int | None:
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    process.join(240)
    process.kill()
    return process.exitcode


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(number):
    assert status_of(_told_twice, number) == 128 + number


def _told_twice(number: int) -> None:
    signals.SAME_PRESS = signals.SAME_NOTICE = 0.0
    with StopSignals(lambda: None, 0):
        for _ in range(2):
            os.kill(os.getpid(), number)
            time.sleep(0.2)
        signal.pause()


def test_the_limit_is_of_silence_not_of_work():
    """Steps and checkpoints take their time."""
    assert status_of(_at_work) == 0


def _at_work() -> None:
    now = [0.0]
    signals.SILENCE, signals._LOOK = 10.0, 0.01
    signals.time = SimpleNamespace(monotonic=lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds
        time.sleep(0.1)  # for the listener to look at the clock

    with StopSignals(lambda: None, 0) as heard:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: heard.number != 0)
        for _ in range(6):
            pass_time(9)
            heard.note_step()
        with heard.suspend_limit():
            pass_time(90)
        heard.lift_limit()
        pass_time(90)
    os._exit(0)


def test_how_to_go_on_is_as_it_was_started():
    run = Path("my runs/first")
    ours = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    theirs = {**ours, "TORCHELASTIC_RUN_ID": "x"}
    assert resume_command(run, {}) == "freescale train --folder 'my runs/first' --resume"
    assert (
        resume_command(run, ours) == "freescale train --folder 'my runs/first' --resume --nproc 4"
    )
    assert (
        resume_command(run, theirs)
        == "torchrun --nproc-per-node 4 -m freescale train --folder 'my runs/first' --resume"
    )
    assert resume_command(run, {**theirs, "WORLD_SIZE": "8"}).startswith(
        "torchrun --nnodes 2 ... --nproc-per-node 4 -m freescale"
    )
