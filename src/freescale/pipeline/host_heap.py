"""Keeps memory that threads have freed from piling up in the process.

glibc gives every thread a heap of its own, whose freed memory no other thread uses, and learns from
each large block that is freed to keep larger ones: beside a batch that travels in one thread and
computes in another, this adds up to batches.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE = 8 << 20  # bytes of a block that goes back to the system as soon as it is freed
_settings = {_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: _LARGE, _M_TRIM_THRESHOLD: 2 * _LARGE}


def share_heap() -> bool:
    """From now on new threads use the first thread's heap, and large blocks are returned when they
    are freed. For the whole process. Returns whether the C library is glibc, which can do this."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return all([library.mallopt(name, value) == 1 for name, value in _settings.items()])
