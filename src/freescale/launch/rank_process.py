"""The process that ranks are forked from after a failure, and the start of a rank in it.
`freescale.launch.rank_server` starts it.

It only imports the modules of a run: neither CUDA nor threads survive a fork. A new rank takes two
forks. The process between ends at once, so the rank becomes a child of the launcher, like one that
the launcher has started: it receives its signals, reports its status, and ends with it. The server
may be killed meanwhile.

    launcher -> server    a byte, with the rank's standard error and a connection to the rank
    server -> launcher    a byte: imports are complete
    rank -> launcher      its process, once it is a child of the launcher
    launcher -> rank      the command, as JSON
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from freescale.launch.signals import SIGNALS

PROCESS = struct.Struct("<i")
PATIENCE = 10.0  # seconds until launcher and rank give up on each other
# Niceness of imports: ranks that train have priority. They take 5 s of an idle core, and a minute
# if all cores are busy; with the greatest niceness it would be five.
_NICENESS = 10
_NEEDED = (
    *("freescale.train.commands", "freescale.launch.restarts", "freescale.report.console"),
    *("torch._dynamo", "torch.onnx", "triton.language", "numpy.random", "rich.progress"),
    *("rich.console", "rich.table"),
)


def preload() -> None:
    """Imports the modules of a run, including those that torch's optimizers import on first use.
    Without Triton there are no kernels."""
    for name in _NEEDED:
        with suppress(ImportError):
            import_module(name)
    with suppress(ImportError):
        import_module("freescale.kernels.jit.compile").preload()


def run_module(module: str, arguments: Sequence[str]) -> None:
    """`python -m MODULE ARGUMENTS`, in this process."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(fd: int) -> None:
    """Runs the server until the connection `fd` is closed. Returns only in ranks, after their run:
    they end like any program."""
    # Signals are for ranks. The server blocks them; a new rank receives its own.
    inherited = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    launcher = os.getppid()
    if sys.path[0] == "":  # as of `python -m`
        sys.path[0] = os.getcwd()
    fds = _serve(socket.socket(fileno=fd))
    work = _meet_launcher(*fds, launcher)
    signal.pthread_sigmask(signal.SIG_SETMASK, inherited)
    _become_rank(work)
    run_module(work["module"], work["arguments"])


def _serve(control: socket.socket) -> tuple[int, int]:
    """Forks ranks. Returns in them, with standard error and the connection to the launcher."""
    importing = threading.Thread(target=_import_all, args=(control,))
    importing.start()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            os._exit(0)  # the launcher has ended, or needs no more ranks
        importing.join()
        if _fork():
            control.close()
            return fds[0], fds[1]
        for each in fds:
            os.close(each)


def _import_all(control: socket.socket) -> None:
    """Imports on its own thread: on Linux, `nice` affects one thread, and only root can undo it."""
    try:
        os.nice(_NICENESS)
        preload()
        gc.freeze()  # imported objects stay in pages that all ranks share
        atexit.register(gc.unfreeze)  # Triton 3.8 and later report what is not freed at exit
        control.sendall(b"u")
    except ConnectionError:
        os._exit(0)
    except BaseException:  # noqa: BLE001 - there is nothing to fork
        traceback.print_exc()
        os._exit(1)


def _fork() -> bool:
    """Forks a process that is not a child of this one. Returns True in it."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    try:
        rank = os.fork()
    except BaseException:  # noqa: BLE001 - the launcher sees that nobody is there
        os._exit(1)
    if rank:
        os._exit(0)
    return True


def _meet_launcher(stderr: int, connection: int, launcher: int) -> dict[str, Any]:
    """Receives the command from the launcher."""
    os.dup2(stderr, 2)
    os.close(stderr)
    end = time.monotonic() + PATIENCE
    while os.getppid() != launcher:
        if time.monotonic() > end:
            os._exit(1)
        time.sleep(0.001)
    with socket.socket(fileno=connection) as link:
        link.settimeout(PATIENCE)
        try:
            link.sendall(PROCESS.pack(os.getpid()))
            with link.makefile("rb") as file:
                work: dict[str, Any] = json.loads(file.read())
        except (OSError, ValueError):  # it has given up
            os._exit(1)
    return work


def _become_rank(work: Mapping[str, Any]) -> None:
    """Makes this process equal to one that was started anew. Its environment differs from the
    server's only in `RANK_VARIABLES`."""
    import numpy as np
    import torch

    os.environ.clear()
    os.environ.update(work["environment"])
    if torch.cuda._is_in_bad_fork():  # an imported module has initialized CUDA
        os.execv(sys.executable, [sys.executable, "-m", work["module"], *work["arguments"]])
    torch.default_generator.seed()
    np.random.seed()  # a fork reseeds Python's own generator
