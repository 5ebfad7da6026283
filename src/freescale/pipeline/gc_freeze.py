"""Keeps Python's garbage collector away from long-lived objects while schedules run.

A full collection walks through every object of the process: with torch loaded 100 to 300 ms, on
each rank at a different moment, and all other ranks wait for it. Objects that exist when a schedule
begins live on anyway, so they are frozen.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_running = 0  # schedules, in this process


@contextmanager
def freeze_objects() -> Iterator[None]:
    """Inside, the collector sees only objects made since; everything again once no schedule
    runs."""
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
