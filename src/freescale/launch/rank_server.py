"""Ranks that start without importing torch: after a failure they are forked from a process that has
done so while the ranks before them trained. The launcher's end of it; the other one is
`freescale.launch.rank_process`."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from freescale.launch.rank_process import PATIENCE, PROCESS
from freescale.launch.ranks import RANK_VARIABLES, RankProcess, start_rank

_START = "from freescale.launch.rank_process import main; main({fd})"
_BECOME_REAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl

_Inherited = tuple[dict[str, str], set[int]]  # environment variables, cores


def is_supported() -> bool:
    """Whether a process can adopt its grandchildren: on Linux."""
    return sys.platform.startswith("linux")


class ForkedRank:
    """A rank that is a child of this process but was not started by `subprocess`, with the part of
    Popen's interface that ranks.py uses."""

    def __init__(self, pid: int, stderr: IO[str]) -> None:
        self.pid, self.stderr = pid, stderr
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        # held: by another thread, or by the code that the handler of a signal has interrupted
        if self.returncode is None and self._lock.acquire(blocking=False):
            try:
                self.returncode = self._find_status()
            finally:
                self._lock.release()
        return self.returncode

    def _find_status(self) -> int | None:
        try:
            child, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # somebody else has its status: it may have failed
            return 1
        return os.waitstatus_to_exitcode(status) if child else None

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class RankServer:
    """Starts ranks: first as new processes, then, once its server is up, as forks of that. Ends
    with `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._inherited: _Inherited | None = None
        self._up = False

    @property
    def pid(self) -> int | None:
        """The server's process, once it has been started."""
        return None if self._process is None else self._process.pid

    def start_rank(self, command: Sequence[str], environment: Mapping[str, str]) -> RankProcess:
        """Starts a rank, like `ranks.start_rank`."""
        inherited = _find_inherited(environment)
        if self.is_up():
            if inherited == self._inherited:
                try:
                    return self._fork(command, environment)
                except OSError as error:
                    self.close()
                    _explain(f"the process that forks them did not answer ({error})")
            else:
                _explain("their environment or their cores have changed")
        rank = start_rank(command, environment)
        if self._process is None and _is_last(environment):  # it takes nothing from their start
            self._begin(inherited)
        return rank

    def explain_absence(self) -> None:
        """Prints why the next ranks will not be forked, if so."""
        if not self.is_up() and self._process is not None:
            _explain("the process that forks them is still importing torch")

    def close(self) -> None:
        """Ends the server. Ranks continue; the next one starts another server."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()  # it has nothing to clean up
            self._process.wait()
        self._process, self._control, self._up = None, None, False

    def _begin(self, inherited: _Inherited) -> None:
        """Starts the server."""
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-c", _START.format(fd=fd)]
            try:
                self._process = subprocess.Popen(command, env=inherited[0], pass_fds=[fd])
            except OSError as error:
                ours.close()
                _explain(f"no process can be started that forks them ({error})")
                return
        self._control, self._inherited = ours, inherited

    def is_up(self) -> bool:
        """Whether the server is up. If it has ended, closes it with a message."""
        if self._control is None:
            return False
        with suppress(BlockingIOError):
            try:
                received = self._control.recv(1, socket.MSG_DONTWAIT)
            except ConnectionError:
                received = b""
            if not received:
                self.close()
                _explain("the process that forks them has ended")
                return False
            self._up = True
        return self._up

    def _fork(self, command: Sequence[str], environment: Mapping[str, str]) -> ForkedRank:
        """Forks a rank from the server. OSError if that fails."""
        assert self._control is not None and list(command[:2]) == [sys.executable, "-m"]
        work = {"module": command[2], "arguments": list(command[3:])}
        message = json.dumps(work | {"environment": dict(environment)}).encode()
        read, write = os.pipe()
        ours, theirs = socket.socketpair()
        try:
            with _adopt_orphans(), ours:
                try:
                    socket.send_fds(self._control, [b"f"], [write, theirs.fileno()])
                finally:
                    theirs.close()
                    os.close(write)
                ours.settimeout(PATIENCE)
                # the rank runs nothing yet: without a command it ends by itself
                answer = ours.recv(PROCESS.size, socket.MSG_WAITALL)
                if len(answer) < PROCESS.size:
                    raise ConnectionResetError("it could not fork")
                ours.sendall(message)
        except OSError:
            os.close(read)
            raise
        return ForkedRank(PROCESS.unpack(answer)[0], os.fdopen(read, errors="replace"))


@contextmanager
def open_rank_server(restarts: int) -> Iterator[RankServer | None]:
    """Opens a server for a run with so many restarts; yields None if it has no use."""
    if not restarts or not is_supported():
        yield None
        return
    server = RankServer()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def _adopt_orphans() -> Iterator[None]:
    """Within the block, a rank whose parent has ended becomes a child of this process."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_BECOME_REAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl: processes cannot be adopted")
    try:
        yield
    finally:
        prctl(_BECOME_REAPER, 0, 0, 0, 0)


def _find_inherited(environment: Mapping[str, str]) -> _Inherited:
    """Returns the inputs from which torch, OpenMP and MKL choose their number of threads when they
    are loaded. The number affects bits, and torch.set_num_threads cannot repeat the choice: it
    ignores MKL's limit and the cores, and keeps MKL from using fewer threads for little work."""
    own = {name: value for name, value in environment.items() if name not in RANK_VARIABLES}
    return own, os.sched_getaffinity(0)


def _is_last(environment: Mapping[str, str]) -> bool:
    return int(environment["LOCAL_RANK"]) + 1 == int(environment["LOCAL_WORLD_SIZE"])


def _explain(why: str) -> None:
    print(f"freescale: ranks start as new processes: {why}", file=sys.stderr, flush=True)
