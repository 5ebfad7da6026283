"""What channels are made of, whether the engine drives them (engine.py) or Python (ucx_channel.py).

A channel carries transfers in one order, the same on every rank. `urgent` transfers overtake bulk
transfers of the same rank, which are on other channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freescale.transport.api import TransportError
from freescale.transport.hostwire.pinned import Pinned

SLOTS = 8  # of a ring: some are copied to, some are on the wire, some are copied from
LARGEST = 4 << 20  # bytes of a piece, and of a slot
URGENT_TIMES = 2  # size limit of urgent pieces, in bulk pieces: urgent traffic gives way to nobody


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
