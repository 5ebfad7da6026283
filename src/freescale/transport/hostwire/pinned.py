"""Memory of the host that copy engines can reach: slots, allocated once, used in turn."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from freescale.pinning import pin


class Pinned:
    """`size` bytes of the host, as a tensor `bytes` [size]; pinned where `device` is a GPU, which
    copies from or to them. With `file`, a descriptor, memory that other processes of this machine
    can map.

    Raises:
        RuntimeError, OSError: the memory cannot be had, or not be pinned.
    """

    def __init__(self, size: int, device: torch.device, file: int | None = None) -> None:
        self._unpin: Callable[[], object] = _do_nothing
        self._map: mmap.mmap | None = None
        if file is None:
            self.bytes: Tensor = torch.empty(
                size, dtype=torch.uint8, pin_memory=device.type == "cuda"
            )
            return
        self._map = mmap.mmap(file, size)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        if device.type == "cuda":
            try:
                self._unpin = pin(self, self.bytes.data_ptr(), size)
            except RuntimeError as error:
                raise RuntimeError(
                    f"the driver does not pin {size:,} bytes of shared memory ({error})"
                ) from None

    def close(self) -> None:
        """Unpins and unmaps it, once nobody copies any more."""
        self._unpin()
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if self._map is not None:
            with suppress(BufferError):  # a view is still about; the last one unmaps it
                self._map.close()
            self._map = None


def create_shared_file(size: int) -> int:
    """Creates a file without a name, in memory, and returns its descriptor: whoever gets it can map
    the file, which goes with the last of them. Its size is final: a process that has mapped it is
    never left with memory that is gone."""
    import fcntl  # not on Windows, where ranks talk otherwise

    file = os.memfd_create("freescale", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    )
    return file


def _do_nothing() -> None:
    pass
