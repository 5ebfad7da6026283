"""Threads that work beside the main one and end with the process."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

_PATIENCE = 2.0  # seconds that a process which ends waits for its threads
_running: dict[threading.Thread, Callable[[], None]] = {}


def start_thread(name: str, work: Callable[[], None], end: Callable[[], None]) -> threading.Thread:
    """Starts a thread that ends with the process.

    It is a daemon, because a thread that waits for a dead rank must not keep the process from
    ending; but it is asked to end first, because one that is cut off inside torch aborts the
    process.

    Args:
        name: of the thread, after "freescale".
        work: what it runs.
        end: makes `work` finish what it has and return; called from another thread.
    """

    def run() -> None:
        try:
            work()
        finally:
            _running.pop(thread, None)

    thread = threading.Thread(target=run, name=f"freescale {name}", daemon=True)
    _running[thread] = end
    thread.start()
    return thread


@atexit.register
def _end_all() -> None:
    left = dict(_running)
    for end in left.values():
        end()
    deadline = time.monotonic() + _PATIENCE
    for thread in left:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
