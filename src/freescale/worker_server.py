"""The process that data workers are forked from: the trainer's end of it.

A worker needs torch, whose import takes seconds. One process imports it, while the trainer imports
it too and builds its model; then workers are forked from it, in milliseconds each, as often as a
run needs them. This module imports no torch: a command starts the server before anything else.

    trainer -> server   FORK: fork workers, each with a connection and shared descriptors
                        STATUS: how did this worker end?  STOP: end all workers
    server -> trainer   UP: torch is imported; or the requested status

Workers are not forked from the trainer: CUDA and threads do not survive a fork. The server and its
workers end with the connection, however the trainer ends.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from freescale.config import RunConfig

RECORD = struct.Struct("<ii")  # kind and number
MOST_WORKERS = 64  # per fork: the kernel passes at most 253 descriptors
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from freescale.data.batches.worker_process import main; main({fd})"
)
_PATIENCE = 2.0  # seconds that a running server has to end its workers


class Record(IntEnum):
    """Messages between trainer and server."""

    FORK = 1
    STATUS = 2
    STOP = 3
    UP = 4


class WorkerServer:
    """Starts at once; ends on `close` or with this object."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            one = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
            # no CUDA; not in our process group: Ctrl-C in a terminal is the trainer's business
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=sys.path, fd=fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=[fd],
                env=os.environ | one | {"CUDA_VISIBLE_DEVICES": ""},
                process_group=0,
            )
        self._control, self._is_up = ours, False
        self._end = weakref.finalize(self, _kill, self._process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def fork(self, connections: Sequence[socket.socket], shared: Sequence[int]) -> None:
        """Forks a worker per connection once the server is up, without waiting. All get
        `shared`."""
        if len(connections) > MOST_WORKERS:
            raise ValueError(
                f"workers is {len(connections)}; it may be {MOST_WORKERS} at most for a rank"
            )
        fds = [*shared, *(each.fileno() for each in connections)]
        with suppress(BrokenPipeError, ConnectionResetError):  # seen when waiting for a worker
            record = RECORD.pack(Record.FORK, len(connections))
            socket.send_fds(self._control, [record], fds)

    def find_status(self, worker: int) -> int:
        """The exit status of a dead worker (negative: its signal), or of the server if that
        ended."""
        with suppress(OSError):
            self._control.sendall(RECORD.pack(Record.STATUS, worker))
            while (answer := self._control.recv(RECORD.size, socket.MSG_WAITALL)) != b"":
                kind, status = RECORD.unpack(answer)
                if kind == Record.STATUS:
                    return int(status)
                self._is_up = True
        return self._process.wait()

    def stop(self) -> None:
        """Kills the workers. More can be forked."""
        with suppress(OSError):
            self._control.sendall(RECORD.pack(Record.STOP, 0))

    def close(self) -> None:
        """Ends the workers and the server."""
        if not self._end.alive:
            return
        poll = select.poll()  # select() refuses descriptors above 1023
        poll.register(self._control, select.POLLIN)
        if self._is_up or poll.poll(0):
            # only the server can end and reap its children
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)
        self._end()


def _kill(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # it has nothing to clean up
        process.wait()


def choose_workers(workers: int | None, device: str, cores: int, ranks: int) -> int:
    """Worker processes of a rank, by device type, cores of the machine and its ranks.

    0: a thread of the trainer. On CPUs the trainer releases the interpreter while it computes, and
    the cores are busy with that.
    """
    if workers is not None:
        return workers
    return 0 if device == "cpu" else max(0, min(8, cores // ranks - 1))


def count_workers(config: RunConfig, device: str) -> int:
    """Processes that make the batches of this rank."""
    return choose_workers(config.data.workers, device, _count_all_cores(), _count_ranks())


def count_cores(ranks: int | None = None) -> int:
    """Cores per rank of this machine. torch's own number is 1 under torchrun."""
    return max(1, _count_all_cores() // (ranks or _count_ranks()))


def _count_all_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _count_ranks() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def start_early(config: RunConfig) -> WorkerServer | None:
    """The server of a run, before a GPU is certain; None for a run without workers."""
    device = config.train.device
    if device == "auto":
        device = "cuda" if may_have_gpu() else "cpu"
    return WorkerServer() if count_workers(config, device) else None


def may_have_gpu() -> bool:
    """Whether a GPU is likely, without the driver, which needs torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    return not hidden and any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/dxg"))
