"""Memory of the process while schedules run: Python's garbage collector, and glibc's heap.

A full collection walks through every object of the process: with torch loaded 100 to 300 ms, on
each rank at a different moment, and all other ranks wait for it. Objects that exist when a schedule
begins live on anyway, so they are frozen.

glibc gives every thread a heap of its own, whose freed memory no other thread uses, and learns from
each large block that is freed to keep larger ones. If a batch travels in one thread and computes in
another, this adds up to whole batches.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

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


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE = 4 << 20  # bytes of a block that goes back to the system as soon as it is freed
_KEPT = 8 << 20  # bytes that stay at the end of the heap, for small blocks
_WORTH = 16 << 20  # bytes of rows in a batch from which on trimming pays
_settings = {_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: _LARGE, _M_TRIM_THRESHOLD: _KEPT}


def share_heap() -> bool:
    """From now on new threads use the first thread's heap, and large blocks are returned when they
    are freed. For the whole process. Returns whether the C library is glibc, which can do this."""
    library = _load_glibc()
    if library is None:
        return False
    return all([library.mallopt(name, value) == 1 for name, value in _settings.items()])


def trim_heap(travelled: int = _WORTH) -> bool:
    """Returns free pages inside the heap to the system, if a batch of at least `_WORTH` bytes has
    travelled through it: pieces of it were allocated between smaller blocks that live on. Returns
    whether it did. Takes some milliseconds: small batches keep their pages."""
    library = _load_glibc() if travelled >= _WORTH else None
    return library is not None and library.malloc_trim(ctypes.c_size_t(0)) >= 0


@cache
def _load_glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
