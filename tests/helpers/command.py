"""`freescale ...` in processes of its own, forked from one that has imported torch: to start Python
takes each of them six seconds of a core. `started` does that: what depends on it, and one run from
its beginning to its end, is tested so. The ranks of `torchrun` start Python too."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from helpers.ranks import CONTEXT

_FORK = multiprocessing.get_context("fork")


def started(*arguments: object, timeout: float = 240) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "freescale", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def freescale(
    *arguments: object, timeout: float = 240, **environment: str
) -> subprocess.CompletedProcess:
    """As `started`, but for who imports torch."""
    with Begun(*arguments, **environment) as begun:
        return begun.ended(timeout)


def wait_for(condition: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come in {seconds:.0f} s"
        time.sleep(0.02)


class Begun:
    """`freescale ...` while it runs; whoever leaves the block early kills it. `module`: another
    program than freescale; `network`: a network namespace that it runs in."""

    def __init__(
        self,
        *arguments: object,
        module: str = "freescale",
        network: str | None = None,
        **environment: str,
    ) -> None:
        self._words = [str(word) for word in arguments]
        self._folder = tempfile.TemporaryDirectory()
        self._said = [Path(self._folder.name) / name for name in ("out", "err")]
        told, said = {**os.environ, **environment}, [str(file) for file in self._said]
        work = (module, self._words, told, os.getcwd(), said, network)
        self._process = CONTEXT.Process(target=_forked, args=work)

    def __enter__(self) -> Begun:
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        return self

    def ranks(self) -> list[int]:
        """Processes of the ranks that it started."""
        return [
            int(child)
            for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        ]

    def runs(self) -> bool:
        return self._process.exitcode is None

    def read_output(self, stream: int = 0) -> str:
        """What it has written so far: to stdout, or with 1 to stderr."""
        path = self._said[stream]
        return path.read_text(errors="replace") if path.exists() else ""

    def ended(self, timeout: float = 240) -> subprocess.CompletedProcess:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._words, timeout)
        return subprocess.CompletedProcess(
            self._words,
            self._process.exitcode,
            *(file.read_text(errors="replace") for file in self._said),
        )

    def __exit__(self, *_: object) -> None:
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._folder.cleanup()


def torchrun(*arguments: object, network: str | None = None, **environment: str) -> Begun:
    """`torchrun ARGUMENTS -m freescale ...`, to be entered."""
    return Begun(*arguments, module="torch.distributed.run", network=network, **environment)


def _forked(
    module: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    said: Sequence[str],
    network: str | None,
) -> None:
    gc.freeze()  # schedules collect garbage first, over all that was imported
    os.chdir(folder)
    if network is not None:
        from faults.hosts_testbed import enter_network

        enter_network(network)
    for file, number in zip(said, (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
    from freescale.launch import ranks

    ranks.subprocess = SimpleNamespace(
        Popen=Forked, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )
    _run(module, words, environment)


def _run(module: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, errors="replace", closefd=False) for number in (1, 2)
    )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Forked:
    """A rank of launch/ranks.py, with the verbs of a Popen that it uses."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], stderr: int, text: bool, errors: str
    ) -> None:
        assert list(command[:2]) == [sys.executable, "-m"] and stderr == subprocess.PIPE and text
        read, write = os.pipe()
        self._process = _FORK.Process(target=_as_rank, args=(command[2], command[3:], env, write))
        self._process.start()
        os.close(write)
        self.stderr = os.fdopen(read, errors=errors)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        if self.poll() is None:
            os.kill(self._process.pid, number)


def _as_rank(
    module: str, words: Sequence[str], environment: Mapping[str, str], stderr: int
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(stderr, 2)
    _run(module, words, environment)
