"""What channels are made of, whether the engine drives them (engine.py) or Python (ucx_channel.py).

A channel carries transfers in one order, the same on every rank. `urgent` transfers overtake bulk
transfers of the same rank, which are on other channels.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.pinning import pin
from freescale.transport.api import TransportError

SLOTS = 8  # of a ring: some are copied to, some are on the wire, some are copied from
LARGEST = 4 << 20  # bytes of a piece, and of a slot
URGENT_TIMES = 2  # size limit of urgent pieces, in bulk pieces: urgent traffic gives way to nobody


class Pinned:
    """`size` bytes of host memory, as a tensor `bytes` [size]; pinned if `device` is a GPU. With
    `file`, a descriptor, other processes of this machine can map the memory. RuntimeError or
    OSError if it cannot be allocated or pinned."""

    def __init__(self, size: int, device: torch.device, file: int | None = None) -> None:
        self._unpin: Callable[[], object] = lambda: None
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
    can map the file. The size is sealed: mapped memory cannot be taken away."""
    import fcntl  # not on Windows

    file = os.memfd_create("freescale", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    )
    return file


@dataclass(frozen=True)
class ChannelParts:
    """What a channel needs."""

    rank: int
    device: torch.device
    ring: Pinned  # SLOTS slots that wires send from; ranks of this machine may read them
    piece: int  # bytes of the largest piece of bulk traffic
    seconds: float  # how long a peer may be silent

    def __post_init__(self) -> None:
        assert not self.slot or self.largest <= self.slot, (self.piece, self.slot)

    @property
    def largest(self) -> int:
        """Bytes of the largest piece of urgent traffic."""
        return min(LARGEST, URGENT_TIMES * self.piece)

    @property
    def slot(self) -> int:
        """Bytes of a slot; 0 without a ring."""
        return self.ring.bytes.numel() // SLOTS


def make_error(
    rank: int, kind: str, urgent: bool, peer: int, left: int, reason: str
) -> TransportError:
    """The error of `rank` for a transfer that `peer` leaves unfinished, with `left` bytes to go."""
    return TransportError(
        f"rank {rank}: {'urgent' if urgent else 'bulk'} exchange of {kind} failed: rank {peer} "
        f"died or fell silent, {left:,} bytes outstanding ({reason})"
    )
