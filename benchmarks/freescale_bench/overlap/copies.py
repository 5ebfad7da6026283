"""Hostwire's copies alone: a channel of the engine as it is, whose peers are sockets with every
answer in them beforehand."""

from __future__ import annotations

import os
import socket
from collections import deque
from contextlib import suppress
from itertools import accumulate

import torch

from freescale.transport.hostwire.bindings import EngineLibrary
from freescale.transport.hostwire.engine import EngineChannel, EngineGate, EngineTransfer
from freescale.transport.hostwire.pinned import Pinned, create_shared_file
from freescale.transport.hostwire.steps import SLOTS, ChannelParts
from freescale.transport.hostwire.transfer import cut
from freescale.transport.hostwire.wires.shared import PIECE, READ, SharedWire
from freescale_bench.overlap.arms import SECONDS, Bed

WAYS = ("device to host", "host to device")
_FLIGHT = 2  # transfers under way, as of a lane
_DRAINED = 1 << 20


class Copies:
    def __init__(self, bed: Bed, library: EngineLibrary) -> None:
        self._piece, self._device = bed.hostwire.piece, bed.device
        self._peers = [peer for peer in range(bed.world) if peer != bed.rank]
        self._out, self._into = (_shared(SLOTS * self._piece, bed.device) for _ in WAYS)
        # out, in: ours and the peer's
        self._pairs = {peer: (socket.socketpair(), socket.socketpair()) for peer in self._peers}
        ours = [{peer: pairs[way][0] for peer, pairs in self._pairs.items()} for way in range(2)]
        self._wire = SharedWire(self._out, ours[0], ours[1], dict.fromkeys(self._peers, self._into))
        gate = EngineGate(library, 0.001)
        parts = ChannelParts(bed.rank, bed.device, self._out, self._piece, SECONDS)
        self._channel = EngineChannel(library, parts, [self._wire], gate)
        self._tensors: dict[int, torch.Tensor] = {}
        self._under_way: deque[EngineTransfer] = deque()
        self._slot = 0

    def copy(self, way: str, size: int) -> None:
        """What an AllToAll of `size` copies one way. The last ones may be under way when this
        returns."""
        world = len(self._peers) + 1
        part = max(1, size // world)
        if size not in self._tensors:
            self._tensors[size] = torch.zeros(
                part * (world - 1), dtype=torch.uint8, device=self._device
            )
        tensor, sizes = self._tensors[size], [0] * world
        addresses = list(sizes)
        for peer, place in zip(
            self._peers, accumulate([part] * (world - 2), initial=0), strict=True
        ):
            addresses[peer], sizes[peer] = tensor.data_ptr() + place, part
        pieces = cut(part, self._piece)
        for out, into in self._pairs.values():
            if way == WAYS[0]:
                out[1].send(READ * len(pieces))
            else:
                into[1].send(b"".join(PIECE.pack(self._next_slot(), piece) for piece in pieces))
        nothing = [0] * world
        sent, come = ((addresses, sizes), (nothing, nothing))[:: 1 if way == WAYS[0] else -1]
        self._under_way.append(self._channel.submit("rows", False, (tensor, tensor), *sent, *come))
        self.settle(_FLIGHT - 1)

    def settle(self, left: int = 0) -> None:
        """Until no more than `left` are under way."""
        while len(self._under_way) > left:
            self._under_way.popleft().wait()
            for pairs in self._pairs.values():
                for _, theirs in pairs:
                    theirs.setblocking(False)
                    with suppress(BlockingIOError):
                        theirs.recv(_DRAINED)

    def _next_slot(self) -> int:
        self._slot = (self._slot + 1) % SLOTS
        return self._slot * self._piece

    def close(self) -> None:
        self._channel.close()
        for pairs in self._pairs.values():
            for ours, theirs in pairs:
                ours.close()
                theirs.close()
        for memory in (self._out, self._into):
            memory.close()


def _shared(size: int, device: torch.device) -> Pinned:
    file = create_shared_file(size)
    try:
        return Pinned(size, device, file)
    finally:
        os.close(file)
