"""Host memory that copy engines can reach: slots, allocated once and used in turn."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from freescale.pinning import pin


class Pinned:
    """`size` bytes of host memory, as a tensor `bytes` [size]; pinned if `device` is a GPU. With
    `file`, a descriptor, other processes of this machine can map the memory. RuntimeError or
    OSError if it cannot be allocated or pinned."""

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
            with suppress(BufferError):  # a view is still in use; the last one unmaps it
                self._map.close()
            self._map = None


def create_shared_file(size: int) -> int:
    """Creates an unnamed file in memory and returns its descriptor. Every process that receives it
    can map the file, which disappears with the last of them. The size is sealed: mapped memory
    cannot be taken away."""
    import fcntl  # not on Windows

    file = os.memfd_create("freescale", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    )
    return file


def _do_nothing() -> None:
    pass
