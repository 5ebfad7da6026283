"""Opens the wires of a channel, and measures the network between them once. Everything here is a
collective; if it fails on one rank, it fails on all."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import timedelta

from freescale.transport.failures import needing
from freescale.transport.hostwire.bindings import explain_missing_engine
from freescale.transport.hostwire.channel import LARGEST, SLOTS, Pinned, create_shared_file
from freescale.transport.hostwire.wires.shared import SharedWire
from freescale.transport.hostwire.wires.shared import connect as connect_shared
from freescale.transport.hostwire.wires.tcp import TcpWire
from freescale.transport.hostwire.wires.tcp import connect as connect_tcp
from freescale.transport.hostwire.wires.ucx import UcxWire
from freescale.transport.machine import identify_machine
from freescale.transport.process_group import ProcessGroupTransport

_SMALLEST = 64 << 10  # bytes of a piece
_PROBE, _PROBES = 256 << 10, 4  # bytes, times


@dataclass
class Wires:
    """The wires of a channel: two for the engine, or one over UCX."""

    ring: Pinned  # memory that the wires send from
    shared: SharedWire | None  # None if no two ranks are on one machine
    network: TcpWire | UcxWire | None  # TCP between machines, None if there is one; or UCX
    elsewhere: list[int]  # ranks that this one reaches over the network

    def describe(self) -> str:
        """What carries bytes from this rank to others."""
        shared = self.shared if self.shared is not None and self.shared.out else None
        network = self.network if self.elsewhere else None
        names = sorted(wire.path for wire in (shared, network) if wire is not None)
        return " and ".join(names) or "nothing to carry"

    def close(self) -> None:
        """When no thread uses them any more."""
        for wire in (self.shared, self.network):
            if wire is not None:
                wire.close()
        self.ring.close()


def find_neighbours(meeting: ProcessGroupTransport) -> list[int]:
    """The other ranks that this one can share memory with."""
    machines = meeting.gather_bytes(identify_machine())
    return [
        rank
        for rank in range(meeting.world)
        if rank != meeting.rank and machines[rank] == machines[meeting.rank]
    ]


def open_wires(
    meeting: ProcessGroupTransport, wire: str, neighbours: list[int], timeout: timedelta
) -> Wires:
    """Connects a channel's ranks: those of this machine, `neighbours`, by shared memory, others by
    `wire` (tcp or ucx). TransportError, on all ranks, if that fails, and nothing is open."""
    rank, device, gather = meeting.rank, meeting.device, meeting.gather_bytes
    elsewhere = [peer for peer in range(meeting.world) if peer not in (rank, *neighbours)]
    seconds = timeout.total_seconds()
    if wire == "tcp":
        with _needing("its engine in C", meeting, OSError):
            if reason := explain_missing_engine():
                raise OSError(reason)
    with ExitStack() as always, ExitStack() as failed:
        file, shared = None, None
        network: TcpWire | UcxWire | None = None
        with _needing("memory that copy engines reach", meeting, RuntimeError, OSError):
            if neighbours:
                file = create_shared_file(SLOTS * LARGEST)
                always.callback(os.close, file)
            needs_ring = bool(neighbours) or (device.type == "cuda" and bool(elsewhere))
            ring = Pinned(SLOTS * LARGEST if needs_ring else 0, device, file)
            failed.callback(ring.close)
        if any(gather(b"y" * len(neighbours))):
            with _needing("shared memory of one machine", meeting, RuntimeError, OSError):
                shared = connect_shared(rank, neighbours, ring, file or 0, device, gather, seconds)
                failed.callback(shared.close)
        if wire == "ucx":
            network = UcxWire(rank, meeting.world, gather)
        elif any(gather(b"y" if elsewhere else b"")):
            with _needing("TCP connections", meeting, OSError, ValueError):
                network = connect_tcp(rank, elsewhere, gather, seconds / 2)
        failed.pop_all()
        return Wires(ring, shared, network, elsewhere)


def _needing(
    what: str, meeting: ProcessGroupTransport, *kinds: type[Exception]
) -> AbstractContextManager[None]:
    failure = f"hostwire needs {what}, and rank {{}} has none: {{}}"
    return needing(failure, meeting.gather_bytes, *kinds)


def measure_piece(
    meeting: ProcessGroupTransport, wires: Wires, piece_seconds: float, timeout: float
) -> tuple[int, float]:
    """Measures the network once. Returns the bytes that the slowest pair of ranks moves in
    `piece_seconds`, and the seconds per byte; on one machine the largest piece, and 0."""
    took = 0.0
    if wires.network is not None:
        # To the next rank and from the one before, unless they are on this machine: both ranks of
        # a pair take part, or neither.
        after, before = (
            peer if peer in wires.elsewhere else None
            for peer in ((meeting.rank + 1) % meeting.world, (meeting.rank - 1) % meeting.world)
        )
        probe, limit = wires.network.probe, timeout / 2
        with _needing("an answer of the ranks next to each", meeting, OSError, RuntimeError):
            probe(after, before, _PROBE // 4, limit)  # opens connections
            # a busy machine is not a slow network
            took = min(probe(after, before, _PROBE, limit) for _ in range(_PROBES))
    slowest = max(float(text) for text in meeting.gather_bytes(str(took).encode()))
    if not slowest:
        return LARGEST, 0.0
    fitting = 1 << int(_PROBE / slowest * piece_seconds).bit_length() - 1
    return max(_SMALLEST, min(LARGEST, fitting)), slowest / _PROBE
