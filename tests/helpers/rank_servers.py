"""Ranks of the tests of the process that ranks are forked from. As a program, with a folder: a
launcher that starts a rank of each kind there, prints the processes of the forked one and of the
server, and waits."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from freescale.train.forked_rank import ForkedRank
from freescale.train.rank_server import RankServer
from helpers.command import wait_for


def make_environment(**more: str) -> dict[str, str]:
    """Of the only rank of a run, whose launcher this process is."""
    joined = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    joined |= {"FREESCALE_LAUNCHER": str(os.getpid()), "SOMETHING": "not UTF-8: \udcff"}
    ours = {**os.environ, "OMP_NUM_THREADS": "3", "PYTHONPATH": find_path()}  # 3: MKL has a limit
    ours.pop("PYTEST_CURRENT_TEST", None)  # the server has the environment of another test
    return {**ours, **joined, **more}


def find_path() -> str:
    """PYTHONPATH with which programs find these helpers."""
    tests = str(Path(__file__).parents[1])
    return os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])


def make_command(said: Path, *words: object) -> list[str]:
    """Of a rank that describes itself in the file `said`, then does what the words say."""
    return [sys.executable, "-m", "helpers.rank_report", str(said), *map(str, words)]


def start_server(said: Path, **environment: str) -> RankServer:
    """One that is up."""
    server, told = RankServer(), make_environment(**environment)
    assert server.start_rank(make_command(said, "exit", 0), told).wait(120) == 0
    wait_for(server.is_up)
    return server


def start_forked(server: RankServer, *command: object, **environment: str) -> ForkedRank:
    rank = server.start_rank(make_command(*command), make_environment(**environment))
    assert isinstance(rank, ForkedRank)
    return rank


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    server = start_server(folder / "new")
    rank = start_forked(server, folder / "forked", "wait")
    print(rank.pid, server.pid, flush=True)
    time.sleep(120)
