"""Memory of the host that copy engines can reach: slots, allocated once, used in turn."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import torch
from torch import Tensor


class Pinned:
    """`size` bytes, pinned where a GPU copies from or to them. With `file`, memory that other processes of this machine can map."""

    def __init__(self, size: int, device: torch.device, file: int | None = None) -> None:
        self._registered: int | None = None
        self._map: mmap.mmap | None = None
        if file is None:
            self.bytes: Tensor = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
            return
        self._map = mmap.mmap(file, size)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        if device.type == "cuda":
            status = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), size, 0)
            if int(status) != 0:
                raise RuntimeError(f"the driver does not pin {size:,} bytes of shared memory (cudaHostRegister: {status})")
            self._registered = self.bytes.data_ptr()

    def close(self) -> None:
        """Nobody copies any more."""
        if self._registered is not None:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = None
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if self._map is not None:
            with suppress(BufferError):  # a view is still about; the last one unmaps it
                self._map.close()
            self._map = None


def wake(device: torch.device) -> None:
    """Has a GPU allocate and compute once: what the driver sets up for that it can fail to, once much memory was pinned before."""
    if device.type == "cuda":
        torch.zeros(1, device=device)


def shared_file(size: int) -> int:
    """A file without a name, in memory: whoever gets its descriptor can map it, and it goes with the last of them."""
    file = os.memfd_create("freescale", os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    return file
