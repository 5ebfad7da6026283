"""Python's garbage collector walks through every object of the process now and then: with torch
loaded 100 to 300 ms, on each rank at a moment of its own, and all others wait for it. What is there
when a schedule begins lives on anyway: it is set aside."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_running = 0  # schedules, in this process


@contextmanager
def objects_set_aside() -> Iterator[None]:
    """The collector goes on, over what was made since. Afterwards, when no schedule runs, over
    everything again."""
    global _running
    _running += 1
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        _running -= 1
        if not _running:
            gc.unfreeze()
