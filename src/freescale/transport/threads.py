"""Background threads: they end with the process, and leave other cores to the main thread."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable

import torch

_PATIENCE = 2.0  # seconds that a process which ends waits for its threads
_running: dict[threading.Thread, Callable[[], None]] = {}


def start_thread(name: str, work: Callable[[], None], end: Callable[[], None]) -> threading.Thread:
    """Starts a thread that ends with the process and uses one core. It is a daemon: a thread that
    waits for a dead rank must not keep the process. `end`, called from another thread, makes `work`
    finish and return first: a thread that is cut off inside torch aborts the process."""

    def run() -> None:
        try:
            use_one_core()
            work()
        finally:
            _running.pop(thread, None)

    thread = threading.Thread(target=run, name=f"freescale {name}", daemon=True)
    _running[thread] = end
    thread.start()
    return thread


def use_one_core() -> None:
    """Makes torch's operations on the calling thread run on that thread alone, which otherwise has
    an OpenMP team as large as the main thread's: teams spin between two operations, and take the
    cores several times over. `torch.set_num_threads` would change the number for all threads."""
    torch.get_num_threads()  # sets this thread's number, once
    # The handle finds symbols of everything that torch is linked with.
    set_number = getattr(ctypes.CDLL(torch._C.__file__), "omp_set_num_threads", None)
    if set_number is not None:  # None: torch was built without OpenMP
        set_number(1)


@atexit.register
def _end_all() -> None:
    left = dict(_running)
    for end in left.values():
        end()
    deadline = time.monotonic() + _PATIENCE
    for thread in left:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
