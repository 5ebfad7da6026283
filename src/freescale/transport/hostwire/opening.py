"""Opens the wires of a hostwire, and measures the network between them once. Everything here is a
collective; if it fails on one rank, it fails on all."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from freescale.transport.api import TransportError
from freescale.transport.hostwire.bindings import explain_missing_engine
from freescale.transport.hostwire.pinned import Pinned, shared_file
from freescale.transport.hostwire.steps import LARGEST, SLOTS
from freescale.transport.hostwire.wires.gloo import GlooWire, Wire
from freescale.transport.hostwire.wires.shared import SharedWire, identify_machine
from freescale.transport.hostwire.wires.shared import connect as connect_shared
from freescale.transport.hostwire.wires.tcp import TcpWire
from freescale.transport.hostwire.wires.tcp import connect as connect_tcp
from freescale.transport.process_group import ProcessGroupTransport

_SMALLEST = 64 << 10
_PROBE, _PROBES = 256 << 10, 4
_LINES = {"cpu": 1, "cuda": 3}  # groups of gloo that a channel takes in turn
AnyWire = Wire | TcpWire


@dataclass
class Opened:
    ring: Pinned  # what the wires send from
    wires: list[AnyWire]
    routes: list[AnyWire]  # by rank


def same_machine(meeting: ProcessGroupTransport) -> list[int]:
    """The other ranks that this one can share memory with."""
    machines = meeting.gather_bytes(identify_machine())
    return [
        rank
        for rank in range(meeting.world)
        if rank != meeting.rank and machines[rank] == machines[meeting.rank]
    ]


def open_wires(
    meeting: ProcessGroupTransport, wire: str, neighbours: list[int], timeout: timedelta
) -> Opened:
    """`neighbours`: ranks to share memory with. `wire`, to the others: gloo, tcp or ucx. If it
    fails it closes what it opened."""
    with ExitStack() as always, ExitStack() as failed:
        rank, world, device, seconds = (
            meeting.rank,
            meeting.world,
            meeting.device,
            timeout.total_seconds(),
        )
        elsewhere = [peer for peer in range(world) if peer != rank and peer not in neighbours]
        error, file = "", None
        try:
            if neighbours:
                file = shared_file(SLOTS * LARGEST)
                always.callback(os.close, file)
            ring = Pinned(
                SLOTS * LARGEST if neighbours or device.type == "cuda" and elsewhere else 0,
                device,
                file,
            )
            failed.callback(ring.close)
        except (RuntimeError, OSError) as caught:
            error = _said(caught)
        _all_well(meeting, error, "memory that copy engines reach")
        wires: list[AnyWire] = []
        routes: list[AnyWire | None] = [None] * world
        if any(meeting.gather_bytes(b"y" * len(neighbours))):
            try:
                shared = connect_shared(
                    rank, neighbours, ring, file or 0, device, meeting.gather_bytes, seconds
                )
                failed.callback(shared.release)
                failed.callback(shared.close)
                wires.append(shared)
            except (RuntimeError, OSError) as caught:
                error = _said(caught)
            _all_well(meeting, error, "shared memory of one machine")
            for peer in neighbours:
                routes[peer] = wires[0]
        if any(meeting.gather_bytes(b"y" if elsewhere else b"")):
            wires.append(_across(meeting, wire, elsewhere, timeout))
            routes = [route if route is not None else wires[-1] for route in routes]
        failed.pop_all()
        return Opened(
            ring,
            wires,
            [route if route is not None else wires[0] for route in routes] if wires else [],
        )


def _said(caught: BaseException) -> str:
    return str(caught) or type(caught).__name__


def _all_well(meeting: ProcessGroupTransport, error: str, what: str) -> None:
    for rank, text in enumerate(meeting.gather_bytes(error.encode())):
        if text:
            raise TransportError(
                f"hostwire needs {what}, and rank {rank} has none: {text.decode()}"
            )


def _across(
    meeting: ProcessGroupTransport, wire: str, peers: list[int], timeout: timedelta
) -> AnyWire:
    if wire == "ucx":
        from freescale.transport.hostwire.wires.ucx import UcxWire

        return UcxWire(meeting.rank, meeting.world, meeting.gather_bytes)
    if wire == "tcp":
        why = explain_missing_engine()
        _all_well(meeting, why and f"{why}; hostwire-gloo needs none", "its engine for streams")
        error = ""
        try:
            made = connect_tcp(
                meeting.rank, peers, meeting.gather_bytes, timeout.total_seconds() / 2
            )
        except (OSError, ValueError) as caught:
            error = _said(caught)
        _all_well(meeting, error, "TCP connections")
        return made
    ranks = dist.get_process_group_ranks(meeting.group)
    return GlooWire(
        [
            dist.new_group(ranks, timeout=timeout, backend="gloo")
            for _ in range(_LINES[meeting.device.type])
        ]
    )


def network_piece(
    meeting: ProcessGroupTransport, routes: list[AnyWire], piece_seconds: float, timeout: float
) -> tuple[int, float]:
    """(bytes that the slowest pair moves in `piece_seconds`, seconds that it takes for a byte),
    measured once; between ranks of one machine the largest piece, and 0."""
    took, error = 0.0, ""
    if any(not isinstance(route, SharedWire) for route in routes):
        try:
            _probe(meeting, routes, _PROBE // 4, timeout / 2)  # opens connections
            # a busy machine is not a slow network
            took = min(_probe(meeting, routes, _PROBE, timeout / 2) for _ in range(_PROBES))
        except (OSError, RuntimeError) as caught:
            error = _said(caught)
        _all_well(meeting, error, "an answer of the ranks beside each")
    slowest = max(float(text) for text in meeting.gather_bytes(str(took).encode()))
    if not slowest:
        return LARGEST, 0.0
    return max(
        _SMALLEST, min(LARGEST, 1 << int(_PROBE / slowest * piece_seconds).bit_length() - 1)
    ), slowest / _PROBE


def _probe(
    meeting: ProcessGroupTransport, routes: list[AnyWire], size: int, seconds: float
) -> float:
    """To the next rank and from the one before, where they are elsewhere: for each pair of ranks
    both or neither take part."""
    after, before = (meeting.rank + 1) % meeting.world, (meeting.rank - 1) % meeting.world
    to, of = (None if isinstance(routes[peer], SharedWire) else peer for peer in (after, before))
    (across,) = {id(route): route for route in routes if not isinstance(route, SharedWire)}.values()
    if isinstance(across, TcpWire):
        return across.probe(to, of, size, seconds)
    out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    begin = time.perf_counter()
    arriving = across.expect(of, size, into) if of is not None else None
    sending = across.send(to, out) if to is not None else None
    for waited in (arriving, sending):
        if waited is not None:
            waited.wait(seconds)
    return time.perf_counter() - begin
