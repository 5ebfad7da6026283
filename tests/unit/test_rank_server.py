"""Ranks that are forked from a process which has imported torch, against ranks that are new
processes."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.command import wait_for
from helpers.rank_servers import (
    find_path,
    make_command,
    make_environment,
    start_forked,
    start_server,
)

from freescale.launch import rank_process, rank_server
from freescale.launch.ranks import run_ranks, start_rank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are adopted on Linux")


def read(said: Path) -> dict:
    wait_for(Path(f"{said}.json").exists)
    return json.loads(Path(f"{said}.json").read_text())


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module", autouse=True)
def interruptible():
    """Programs that a shell starts in the background ignore SIGINT, and so do those they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def server():
    server = start_server()
    yield server
    server.close()


def describe(start, said: Path, **environment: str) -> dict:
    """What a rank that `start` starts reports, once it has ended."""
    rank = start(make_command(said, "exit", 0), make_environment(**environment))
    assert rank.wait(240) == 0 and rank.stderr.read() == "said by the rank\n"
    report = read(said)
    os.remove(f"{said}.json")
    return report


def test_a_forked_rank_is_as_a_new_process(server, tmp_path):
    expected = describe(start_rank, tmp_path / "said")
    rank = start_forked(server, tmp_path / "said", "exit", 0)
    assert rank.wait(240) == 0
    found = read(tmp_path / "said")
    assert found["same"] == expected["same"] and found["same"]["parent"] == os.getpid()
    assert found["same"]["CUDA"] == [False, False] and found["pid"] == rank.pid


def test_a_rank_with_other_threads_is_as_a_new_process(server, tmp_path):
    """Which of the two variables counts, and for how much, is different with and without MKL."""
    threads = {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "2"}
    expected = describe(start_rank, tmp_path / "said", **threads)
    found = describe(server.start_rank, tmp_path / "said", **threads)
    assert found["same"] == expected["same"]


def test_a_rank_on_fewer_cores_is_as_a_new_process(server, tmp_path):
    """MKL has no more threads than there are cores when it is loaded."""
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        expected = describe(start_rank, tmp_path / "said")
        found = describe(server.start_rank, tmp_path / "said")
    finally:
        os.sched_setaffinity(0, cores)
    assert found["same"] == expected["same"] and found["same"]["cores"] == [min(cores)]


def test_ranks_draw_numbers_of_their_own(server, tmp_path):
    names = [tmp_path / name for name in "ab"]
    for rank in [start_forked(server, name, "exit", 0) for name in names]:
        assert rank.wait(240) == 0
    one, other = (read(name)["draws"] for name in names)
    assert not set(one) & set(other)


@pytest.mark.parametrize(
    ("words", "status", "last"),
    [(("exit", 0), 0, ""), (("exit", 75), 75, ""), (("raise",), 1, "RuntimeError: as told")],
)
def test_a_forked_rank_ends_as_a_new_process(server, tmp_path, words, status, last):
    rank = start_forked(server, tmp_path / "said", *words)
    assert rank.wait(240) == rank.poll() == status
    assert rank.stderr.read().splitlines()[-1] == (last or "said by the rank")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_a_forked_rank(server, tmp_path, number):
    rank = start_forked(server, tmp_path / "said", "wait")
    read(tmp_path / "said")
    assert rank.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.01)
    rank.send_signal(number)
    assert rank.wait(240) == -number


DIE = ["-n1", "-r1", "import os; os.kill(os.getpid(), 9)"]  # of timeit


@pytest.mark.parametrize("forked", [False, True], ids=["new", "forked"])
def test_a_death_is_seen_by_a_launcher_whose_parent_ignores_sigchld(server, forked):
    """The kernel keeps no exit status for a process that ignores it, nor for its children."""
    ours = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        start = server.start_rank if forked else start_rank
        ended = run_ranks(
            DIE, 1, module="timeit", start=lambda command, _: start(command, make_environment())
        )
    finally:
        signal.signal(signal.SIGCHLD, ours)
    assert ended.failed == (0, -signal.SIGKILL)


_ASKED = """
import os

if "RANK" not in os.environ:
    import torch.cuda

    torch.cuda._is_in_bad_fork = lambda: True  # as after a call of CUDA before the fork
"""


def test_a_rank_is_a_new_process_if_something_imported_has_asked_for_gpus(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(_ASKED)
    told = {"PYTHONPATH": f"{tmp_path}:{find_path()}"}
    server = start_server(**told)
    try:
        rank = start_forked(server, tmp_path / "said", "exit", 75, **told)
        assert rank.wait(240) == 75
        found = read(tmp_path / "said")
    finally:
        server.close()
    assert found["pid"] == rank.pid and found["same"]["CUDA"] == [False, False]
    assert found["same"]["blocked"] == [] and found["same"]["parent"] == os.getpid()


def test_signals_do_not_end_the_server(server, tmp_path):
    """They are sent to the whole group of processes, and the launcher passes them on."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(server.pid, number)
    assert start_forked(server, tmp_path / "said", "exit", 0).wait(240) == 0


_NEVER_UP = """
import os, signal

if "RANK" not in os.environ:
    signal.pause()
"""


def test_ranks_outlive_the_server_and_the_next_ones_are_new_processes(tmp_path, capfd):
    server = start_server()
    server.explain_absence()
    assert "new processes" not in capfd.readouterr().err
    rank = start_forked(server, tmp_path / "first", "wait")
    read(tmp_path / "first")
    killed = server.pid
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: not server.is_up())
    assert re.search("start as new processes: .* has ended", capfd.readouterr().err)
    assert rank.poll() is None
    (tmp_path / "sitecustomize.py").write_text(_NEVER_UP)
    told = make_environment(PYTHONPATH=f"{tmp_path}:{find_path()}")
    new = server.start_rank(make_command(tmp_path / "second", "exit", 5), told)
    assert isinstance(new, subprocess.Popen) and new.wait(240) == 5
    server.explain_absence()
    assert re.search("start as new processes: .* still importing", capfd.readouterr().err)
    last = server.pid
    assert last != killed and is_alive(last)
    rank.send_signal(signal.SIGKILL)
    assert rank.wait(240) == -signal.SIGKILL
    server.close()
    assert not is_alive(last)


def test_a_server_that_does_not_answer_is_given_up(tmp_path, monkeypatch, capfd):
    server = start_server()
    stopped = server.pid
    monkeypatch.setattr(rank_server, "PATIENCE", 0.3)
    os.kill(stopped, signal.SIGSTOP)
    new = server.start_rank(make_command(tmp_path / "second", "exit", 5), make_environment())
    assert isinstance(new, subprocess.Popen) and new.wait(240) == 5
    assert re.search("start as new processes: .* did not answer", capfd.readouterr().err)
    assert not is_alive(stopped)
    server.close()


def test_imports_go_behind_the_launcher_whatever_its_own_priority_is(monkeypatch):
    """The priorities of threads are their own, and no user but root may raise one."""
    nice = []
    monkeypatch.setattr(rank_process, "preload", lambda: nice.append(os.nice(0)))
    ours, theirs = socket.socketpair()

    def be_server() -> None:
        nice.append(os.nice(8))
        rank_process._import_all(theirs)

    with ours, theirs:
        thread = threading.Thread(target=be_server)
        thread.start()
        thread.join()
        gc.unfreeze()
        assert ours.recv(1) and nice[0] < nice[1] == min(19, nice[0] + 10)


def test_rank_and_server_end_with_the_launcher(tmp_path):
    command = [sys.executable, "-m", "helpers.rank_servers", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": find_path()}
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    processes = [int(word) for word in launcher.stdout.readline().split()]
    read(tmp_path / "forked")
    assert len(processes) == 2 and all(map(is_alive, processes))
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(map(is_alive, processes)))
