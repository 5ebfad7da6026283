"""Memory that processes share, in slots of one size."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref

import numpy as np
from numpy.typing import NDArray

from freescale.pinning import pin


class Arena:
    """Anonymous memory behind an inheritable file descriptor, freed with its last mapping."""

    def __init__(self, slots: int, slot_bytes: int, fd: int | None = None) -> None:
        """`fd`: of another process's arena; None creates one."""
        page = mmap.PAGESIZE
        self.slots, self.slot_bytes = slots, -(-slot_bytes // page) * page
        size = self.slots * self.slot_bytes
        self.fd = make_file(size) if fd is None else fd
        # views of the array keep it alive, and it the mapping
        self._array: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        weakref.finalize(self, os.close, self.fd)

    def view(self, slot: int) -> NDArray[np.uint8]:
        """[slot_bytes], a new view each time."""
        return self._array[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def pin(self) -> bool:
        """Pins the memory while a view of it lives. False if the driver refuses: copies are then
        slower."""
        try:
            pin(self._array, self._array.ctypes.data, self._array.nbytes)
        except RuntimeError:
            return False
        return True


def make_file(size: int) -> int:
    """The descriptor of an unnamed file of this size, in memory if possible."""
    if hasattr(os, "memfd_create"):  # unlike files in /dev/shm, which containers keep small
        fd = os.memfd_create("freescale-batches")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd
