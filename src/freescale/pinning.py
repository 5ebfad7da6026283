"""Pins host memory in place, so that a GPU reads and writes it directly."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch

_FOR_ALL_GPUS = 1  # cudaHostRegisterPortable


def pin(owner: object, address: int, size: int) -> weakref.finalize[[int], Any]:
    """Pins `size` bytes from `address` on.

    Args:
        owner: keeps the bytes pinned while it lives. Freeing pinned memory breaks later
            allocations.
        address: of memory that lives as long.
        size: in bytes.

    Returns:
        A call that unpins them earlier.

    Raises:
        RuntimeError: the driver refuses; its reason.
    """
    cuda: Any = torch.cuda  # torch does not annotate it
    runtime = cuda.cudart()
    error = runtime.cudaHostRegister(address, size, _FOR_ALL_GPUS)
    if int(error) != 0:
        with suppress(RuntimeError):  # clears the thread's error, which a later launch would report
            torch.zeros(1, device="cuda")
        raise RuntimeError(runtime.cudaGetErrorString(error))
    unpin = weakref.finalize(owner, runtime.cudaHostUnregister, address)
    unpin.atexit = False  # the process takes it along, and the driver may be gone by then
    return unpin
