"""Memory of the host that is pinned where it lies: a GPU reads and writes it by itself."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch

_FOR_ALL_GPUS = 1  # cudaHostRegisterPortable


def pin(owner: object, address: int, size: int) -> weakref.finalize[[int], Any]:
    """Pins `size` bytes from `address` on.

    Args:
        owner: they stay pinned as long as it lives: memory that goes while the driver has it pinned
            takes later allocations down with it.
        address: of memory that lives as long.
        size: in bytes.

    Returns:
        A call that unpins them before.

    Raises:
        RuntimeError: the driver refuses; its reason.
    """
    cuda: Any = torch.cuda  # torch does not annotate it
    runtime = cuda.cudart()
    error = runtime.cudaHostRegister(address, size, _FOR_ALL_GPUS)
    if int(error) != 0:
        with suppress(RuntimeError):  # the error stays with the thread until a launch reports it
            torch.zeros(1, device="cuda")
        raise RuntimeError(runtime.cudaGetErrorString(error))
    unpin = weakref.finalize(owner, runtime.cudaHostUnregister, address)
    unpin.atexit = False  # a process that ends takes it along, and the driver may be gone by then
    return unpin
