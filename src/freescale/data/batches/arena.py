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
    """Anonymous memory behind a file descriptor that other processes inherit. It is gone when the
    last process that maps it is."""

    def __init__(self, slots: int, slot_bytes: int, fd: int | None = None) -> None:
        """`fd`: of an arena that another process made; None makes one."""
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
        """Makes copies to a GPU independent of the host, as long as a view of the memory lives.
        False if the driver refuses: copies are made then, but slower."""
        try:
            pin(self._array, self._array.ctypes.data, self._array.nbytes)
        except RuntimeError:
            return False
        return True


def make_file(size: int) -> int:
    """The descriptor of a file of this size without a name, in memory where that is possible."""
    if hasattr(os, "memfd_create"):  # unlike files in /dev/shm, which containers keep small
        fd = os.memfd_create("freescale-batches")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd
