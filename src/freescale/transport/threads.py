"""Threads that work beside the main one and end with the process."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

import torch

# seconds that a thread looks for an event before it sleeps: to be woken takes longer than many a
# copy
_SPIN = 0.0003
_PATIENCE = 2.0  # seconds that a process which ends waits for its threads
_running: dict[threading.Thread, Callable[[], None]] = {}


def started(name: str, work: Callable[[], None], end: Callable[[], None]) -> threading.Thread:
    """Starts a thread; `end` makes it finish what it has and return. A daemon, because one that
    waits for a dead rank must not keep the process from ending; but asked to end first, because one
    that is cut off inside torch takes the process with it (abort)."""

    def until_done() -> None:
        try:
            work()
        finally:
            _running.pop(thread, None)

    thread = threading.Thread(target=until_done, name=f"freescale {name}", daemon=True)
    _running[thread] = end
    thread.start()
    return thread


def reached(event: torch.cuda.Event) -> None:
    """Waits on the host; for long only asleep, if the event was made so."""
    end = time.perf_counter() + _SPIN
    while not event.query():
        if time.perf_counter() > end:
            event.synchronize()
            return


@atexit.register
def _end_all() -> None:
    left = dict(_running)
    for end in left.values():
        end()
    deadline = time.monotonic() + _PATIENCE
    for thread in left:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
