"""Ranks of the tests of the process that ranks are forked from. As a program, with a folder: a
launcher that starts a rank of each kind there, prints the processes of the forked one and of the
server, and waits."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from freescale.launch import rank_server
from freescale.launch.rank_server import ForkedRank, RankServer
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


def hurry_imports() -> None:
    """Servers that this process starts import at its own priority. At the usual one, lower than
    anybody else's, it takes minutes on a busy machine."""
    import_all = "from freescale.launch import rank_process; rank_process._NICENESS = 0; "
    rank_server._START = import_all + "rank_process.main({fd})"


def start_server(**environment: str) -> RankServer:
    """One that is up. The rank that it starts with does nothing."""
    hurry_imports()
    server, nothing = RankServer(), [sys.executable, "-m", "abc"]
    assert server.start_rank(nothing, make_environment(**environment)).wait(240) == 0
    wait_for(server.is_up)
    return server


def start_forked(server: RankServer, *command: object, **environment: str) -> ForkedRank:
    rank = server.start_rank(make_command(*command), make_environment(**environment))
    assert isinstance(rank, ForkedRank)
    return rank


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    server = start_server()
    rank = start_forked(server, folder / "forked", "wait")
    print(rank.pid, server.pid, flush=True)
    signal.pause()
