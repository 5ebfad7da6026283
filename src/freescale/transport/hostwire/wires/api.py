"""Wires carry pieces of host memory from rank to rank, below a channel of hostwire.

Between two ranks pieces arrive in the order in which they were sent, and both sides know their
sizes. A piece leaves when its receiver expects it: what is expected bounds what is on the way, and
what is urgent need not queue behind more than that.

| wire | between | driven by |
|---|---|---|
| SharedWire | ranks of one machine | the engine, or Python |
| TcpWire | machines | the engine |
| GlooWire, UcxWire | any ranks | Python |
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from freescale.transport.hostwire.pinned import Pinned


class Sending(Protocol):
    """A piece that leaves."""

    def ready(self) -> bool:
        """Whether `wait` returns at once. False where that is not known."""

    def wait(self, seconds: float) -> Tensor | None:
        """Waits until the memory that was sent may be written again.

        Raises:
            RuntimeError, OSError: the peer is gone, or silent for `seconds`.
        """


class Arriving(Protocol):
    """A piece that comes."""

    def ready(self) -> bool:
        """Whether `wait` returns at once. False where that is not known."""

    def wait(self, seconds: float) -> Tensor:
        """Waits for the bytes, [n] in host memory. Raises as `Sending.wait` does."""

    def free(self) -> None:
        """Says that the bytes have been read."""


class Wire(Protocol):
    """What all wires have. `path` is the ledger's name for it."""

    path: str

    def close(self) -> None:
        """Closes connections: ranks that wait for this one notice."""

    def release(self) -> None:
        """Gives memory of peers back, once it is closed and nobody reads it any more."""


@runtime_checkable
class PieceWire(Wire, Protocol):
    """A wire that Python drives, piece by piece. `direct`: it sends from, and receives into, any
    host memory; otherwise it sends from the channel's ring, and what comes stays where it is."""

    direct: bool

    def send(self, peer: int, piece: Tensor) -> Sending:
        """Sends `piece`: bytes [n] of the channel's ring or, if `direct`, of any host memory."""

    def expect(self, peer: int, size: int, into: Tensor | None) -> Arriving:
        """Expects the next piece of that peer; `into` [size] is given if `direct`."""


@dataclass(frozen=True)
class Endpoint:
    """How the engine reaches a peer: descriptors of sockets, and the peer's ring; without a ring
    both are one stream."""

    send_socket: int
    receive_socket: int
    ring: Pinned | None = None


@runtime_checkable
class EngineWire(Wire, Protocol):
    """A wire that the engine drives."""

    def endpoints(self) -> Mapping[int, Endpoint]:
        """By peer."""

    def limit_buffers(self, size: int) -> None:
        """Limits the bytes that wait in a connection, about: what is urgent on another one queues
        behind them on the network."""

    def hang_up(self) -> None:
        """Wakes all that wait, here and there; the sockets stay open."""


class NetworkWire(Wire, Protocol):
    """A wire between machines."""

    def probe(self, after: int | None, before: int | None, size: int, seconds: float) -> float:
        """Measures how long `size` bytes take to rank `after` while as many come from `before`.
        These ranks probe too. Raises RuntimeError or OSError."""


def probe_pieces(
    wire: PieceWire, after: int | None, before: int | None, size: int, seconds: float
) -> float:
    """`NetworkWire.probe`, for a wire that Python drives."""
    out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    begin = time.perf_counter()
    arriving = wire.expect(before, size, into) if before is not None else None
    sending = wire.send(after, out) if after is not None else None
    if arriving is not None:
        arriving.wait(seconds)
    if sending is not None:
        sending.wait(seconds)
    return time.perf_counter() - begin
