"""Opens the wires of a hostwire, and measures the network between them once. Everything here is a
collective; if it fails on one rank, it fails on all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from freescale.transport.api import TransportError
from freescale.transport.descriptors import LINES
from freescale.transport.failures import find_first_message
from freescale.transport.hostwire.bindings import explain_missing_engine
from freescale.transport.hostwire.pinned import Pinned, create_shared_file
from freescale.transport.hostwire.steps import LARGEST, SLOTS
from freescale.transport.hostwire.wires.api import EngineWire, NetworkWire, PieceWire, Wire
from freescale.transport.hostwire.wires.gloo import GlooWire
from freescale.transport.hostwire.wires.shared import connect as connect_shared
from freescale.transport.hostwire.wires.tcp import connect as connect_tcp
from freescale.transport.machine import identify_machine
from freescale.transport.process_group import ProcessGroupTransport

_SMALLEST = 64 << 10  # bytes of a piece
_PROBE, _PROBES = 256 << 10, 4  # bytes, times


@dataclass
class Wires:
    """The wires of a channel.

    Attributes:
        ring: what the wires send from.
        all: every wire once.
        routes: [world], the wire to each rank; empty for a single rank.
        network: the one between machines, on all ranks or on none.
    """

    ring: Pinned
    all: list[Wire]
    routes: list[Wire]
    network: NetworkWire | None

    def for_engine(self) -> list[EngineWire]:
        """All wires if the engine can drive every one of them, otherwise none."""
        wires = [wire for wire in self.all if isinstance(wire, EngineWire)]
        return wires if len(wires) == len(self.all) else []

    def for_python(self) -> list[PieceWire]:
        """The routes, where Python can drive them."""
        return [route for route in self.routes if isinstance(route, PieceWire)]

    def close(self) -> None:
        """When no thread uses them any more."""
        for wire in self.all:
            wire.close()
            wire.release()
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
    `wire` (gloo, tcp or ucx). If it fails it closes what it opened, and raises TransportError on
    all ranks."""
    rank, world, device = meeting.rank, meeting.world, meeting.device
    elsewhere = [peer for peer in range(world) if peer != rank and peer not in neighbours]
    with ExitStack() as always, ExitStack() as failed:
        file = None
        with _needing("memory that copy engines reach", meeting, RuntimeError, OSError):
            if neighbours:
                file = create_shared_file(SLOTS * LARGEST)
                always.callback(os.close, file)
            needs_ring = bool(neighbours) or (device.type == "cuda" and bool(elsewhere))
            ring = Pinned(SLOTS * LARGEST if needs_ring else 0, device, file)
            failed.callback(ring.close)
        wires: list[Wire] = []
        routes: dict[int, Wire] = {}
        if any(meeting.gather_bytes(b"y" * len(neighbours))):
            with _needing("shared memory of one machine", meeting, RuntimeError, OSError):
                shared = connect_shared(
                    rank,
                    neighbours,
                    ring,
                    file or 0,
                    device,
                    meeting.gather_bytes,
                    timeout.total_seconds(),
                )
                failed.callback(shared.release)
                failed.callback(shared.close)
                wires.append(shared)
                routes |= dict.fromkeys(neighbours, shared)
        network: NetworkWire | None = None
        if any(meeting.gather_bytes(b"y" if elsewhere else b"")):
            network = _open_network_wire(meeting, wire, elsewhere, timeout)
            wires.append(network)
        failed.pop_all()
        return Wires(
            ring,
            wires,
            [routes.get(peer, wires[-1]) for peer in range(world)] if wires else [],
            network,
        )


@contextmanager
def _needing(what: str, meeting: ProcessGroupTransport, *kinds: type[Exception]) -> Iterator[None]:
    """An exception of these kinds inside is a TransportError on all ranks. A collective."""
    error = ""
    try:
        yield
    except kinds as caught:
        error = str(caught) or type(caught).__name__
    _raise_if_missing(what, meeting, error)


def _raise_if_missing(what: str, meeting: ProcessGroupTransport, error: str) -> None:
    if (failed := find_first_message(error, meeting.gather_bytes)) is not None:
        raise TransportError("hostwire needs {}, and rank {} has none: {}".format(what, *failed))


def _open_network_wire(
    meeting: ProcessGroupTransport, wire: str, peers: list[int], timeout: timedelta
) -> NetworkWire:
    if wire == "ucx":
        from freescale.transport.hostwire.wires.ucx import UcxWire

        return UcxWire(meeting.rank, meeting.world, meeting.gather_bytes)
    if wire == "tcp":
        why = explain_missing_engine()
        advice = why and f"{why}; hostwire-gloo needs none"
        _raise_if_missing("its engine for streams", meeting, advice)
        with _needing("TCP connections", meeting, OSError, ValueError):
            seconds = timeout.total_seconds() / 2
            return connect_tcp(meeting.rank, peers, meeting.gather_bytes, seconds)
    ranks = dist.get_process_group_ranks(meeting.group)
    return GlooWire(
        [
            dist.new_group(ranks, timeout=timeout, backend="gloo")
            for _ in range(LINES[meeting.device.type])
        ]
    )


def measure_piece(
    meeting: ProcessGroupTransport, wires: Wires, piece_seconds: float, timeout: float
) -> tuple[int, float]:
    """Measures the network once. Returns the bytes that the slowest pair of ranks moves in
    `piece_seconds`, and the seconds that it takes for a byte; between ranks of one machine the
    largest piece, and 0."""
    took = 0.0
    if wires.network is not None:
        # To the next rank and from the one before, where they are elsewhere: of each pair of ranks
        # both or neither take part.
        after, before = (
            peer if wires.routes[peer] is wires.network else None
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
