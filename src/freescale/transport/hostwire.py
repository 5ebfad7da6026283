"""Transport without multiprocessors: what adds no numbers leaves a GPU by its copy engines and crosses the network from the CPU.

AllToAll goes pair by pair, AllGather as a ring (pair by pair where it is small, or inside one machine), each on a channel over a
wire (channel.py, wires.py; between ranks of one machine engine.py). The part that stays is copied without the wire. What is summed
goes over the process group, NCCL's on GPUs. On CPU tensors the same code runs without the copies.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.observe.ledger import Arrival, Ledger, Side
from freescale.transport.api import TransportError
from freescale.transport.channel import Channel
from freescale.transport.collective import Collective
from freescale.transport.engine import Carry, EngineChannel, EngineGate, calls
from freescale.transport.gate import Gate
from freescale.transport.halves import LARGEST, SLOTS, URGENT_TIMES
from freescale.transport.memory import Pinned, shared_file
from freescale.transport.shared import SharedWire, machine
from freescale.transport.shared import connect as connect_shared
from freescale.transport.transfer import Part, Round, Transfer
from freescale.transport.wires import GlooWire, Wire

_SMALLEST = 64 << 10
_PROBE, _PROBES = 256 << 10, 4
_PIECE_SECONDS = 0.004  # that a piece takes at most on the network: what urgent traffic waits for
_RING = 256 << 10  # bytes that every rank sends: below, an AllGather goes pair by pair
_LINES = {"cpu": 1, "cuda": 3}  # groups of gloo that a channel takes in turn
_URGENT = ("counts",)  # kinds, whatever the channel
WIRES = ("gloo", "ucx")
_Laid = tuple[list[int], list[int]]  # by rank: addresses, bytes


class Pending:
    """A transfer under way."""

    def __init__(self, transfer: Transfer | Carry, output: Tensor, arrival: Arrival, path: str, sent: Tensor) -> None:
        self._transfer, self._output, self._arrival, self._sent = transfer, output, arrival, sent
        self.path, self.bytes = path, arrival.sent

    def wait(self, host: bool = False) -> Tensor:
        with self._arrival.wait():
            self._transfer.wait()
            if host and self._transfer.arrived is not None:
                self._transfer.arrived.synchronize()
        return self._output


class Hostwire(Collective):
    """`wire`: between machines, gloo or ucx. Ranks of one machine share memory over gloo's; UCX finds its own way."""

    def __init__(
        self,
        device: torch.device | str,
        ledger: Ledger | Side,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        wire: str = "gloo",
        shared: bool = True,
        owner: bool = False,
        timeout: timedelta = timedelta(seconds=120),
        above: Hostwire | None = None,
        urgent: bool = False,
    ) -> None:
        """`shared`: memory, between ranks of one machine. `above`: the transport that this one is a channel of. A collective."""
        super().__init__(device, ledger, group=group, control=control, owner=owner, timeout=timeout)
        self.wire, self.shared, self._urgent = wire, shared, urgent
        self.lines = 2  # messages under way: one is copied while the other is on the wire
        self._below: list[Hostwire] = []
        seconds = timeout.total_seconds()
        self._gate: Gate = above._gate if above is not None else Gate(_PIECE_SECONDS / 4)
        self._engine_gate: EngineGate | None = above._engine_gate if above is not None else None
        self._neighbours: list[int] = above._neighbours if above is not None else self._same_machine()
        self._wires: list[Wire] = []
        self._open(seconds)
        self.piece: int = above.piece if above is not None else self._agreed_piece(seconds)
        self._carried_by = self.path_of()
        self._channel: Channel | EngineChannel = self._engine(seconds) or self._python(seconds, patient=above is not None)

    # ---- opening

    def _engine(self, seconds: float) -> EngineChannel | None:
        """Where all ranks share memory, and there is a compiler. Ranks need not agree on it."""
        found = calls() if self._alone_on_machine() else None
        if found is None:
            return None
        if self._engine_gate is None:
            self._engine_gate = EngineGate(found, self._gate.patience)
        (wire,) = self._wires
        assert isinstance(wire, SharedWire)
        return EngineChannel(found, self.rank, self.device, wire, self._ring, self._engine_gate, self.piece, seconds)

    def _python(self, seconds: float, patient: bool) -> Channel:
        name = self.ledger.name if isinstance(self.ledger, Side) else "main"
        return Channel(name, self.rank, self.device, self._routes, self._ring, self._gate, self.piece, seconds, patient)

    def _alone_on_machine(self) -> bool:
        """No rank is elsewhere: the same answer on every rank."""
        return self.world > 1 and self.shared and self.wire == "gloo" and len(self._neighbours) == self.world - 1

    def _same_machine(self) -> list[int]:
        machines = self.gather_bytes(machine())
        return [rank for rank in range(self.world) if rank != self.rank and machines[rank] == machines[self.rank]]

    def _open(self, seconds: float) -> None:
        """The wires and the ring they send from. All ranks try; if one fails, all say so."""
        size = SLOTS * LARGEST
        neighbours = self._neighbours if self.shared and self.wire == "gloo" else []
        error = ""
        self._file: int | None = None
        try:
            if neighbours:
                self._file = shared_file(size)
            elsewhere = self.world - 1 > len(neighbours)
            needed = neighbours or self.device.type == "cuda" and elsewhere
            self._ring: Pinned = Pinned(size if needed else 0, self.device, self._file)
        except (RuntimeError, OSError) as caught:
            error = str(caught)
        self._all_well(error, "memory that copy engines reach")
        routes: list[Wire | None] = [None] * self.world
        try:
            if any(self.gather_bytes(b"y" * len(neighbours))):
                assert self._file is not None or not neighbours
                shared = connect_shared(self.rank, neighbours, self._ring, self._file or 0, self.device, self.gather_bytes, seconds)
                self._wires.append(shared)
                for rank in neighbours:
                    routes[rank] = shared
        except (RuntimeError, OSError) as caught:
            error = str(caught)
        self._all_well(error, "shared memory of one machine")
        if any(self.gather_bytes(b"" if self.world - 1 == len(neighbours) else b"y")):
            across = self._across()
            self._wires.append(across)
            routes = [route if route is not None else across for route in routes]
        self._routes: list[Wire] = [route if route is not None else self._wires[0] for route in routes] if self._wires else []
        if self._file is not None:
            os.close(self._file)

    def _all_well(self, error: str, what: str) -> None:
        errors = self.gather_bytes(error.encode())
        for rank, text in enumerate(errors):
            if text:
                raise TransportError(f"hostwire needs {what}, and rank {rank} has none: {text.decode()}")

    def _across(self) -> Wire:
        if self.wire == "ucx":
            from freescale.transport.ucx import UcxWire

            return UcxWire(self.rank, self.world, self.gather_bytes)
        ranks = dist.get_process_group_ranks(self.group)
        groups = [dist.new_group(ranks, timeout=self._timeout, backend="gloo") for _ in range(_LINES[self.device.type])]
        return GlooWire(groups)

    def _agreed_piece(self, seconds: float) -> int:
        """Bytes that the slowest pair moves in `_PIECE_SECONDS`, measured once; between ranks of one machine the largest."""
        took = 0.0
        if self.world > 1 and not isinstance(self._routes[(self.rank + 1) % self.world], SharedWire):
            self._probe(_PROBE // 4, seconds)  # opens connections
            took = min(self._probe(_PROBE, seconds) for _ in range(_PROBES))  # a busy machine must not pass for a slow network
        slowest = max(float(text) for text in self.gather_bytes(str(took).encode()))
        if not slowest:
            return LARGEST
        piece = max(_SMALLEST, min(LARGEST, 1 << int(_PROBE / slowest * _PIECE_SECONDS).bit_length() - 1))
        self._gate.patience = max(self._gate.patience, 3 * URGENT_TIMES * piece * slowest / _PROBE)
        return piece

    def _probe(self, size: int, seconds: float) -> float:
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        begin = time.perf_counter()
        arriving = self._routes[before].expect(before, size, into)
        sending = self._routes[after].send(after, out)
        arriving.wait(seconds)
        sending.wait(seconds)
        return time.perf_counter() - begin

    # ---- the protocol

    def path_of(self) -> str:
        """What carries bytes from this rank to others."""
        names = sorted({self._routes[peer].path for peer in range(self.world) if peer != self.rank}) if self.world > 1 else []
        return f"hostwire: {' and '.join(names) or 'nothing to carry'}"

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], kind: str) -> Pending:
        assert tensor.is_contiguous() and sum(send) == tensor.shape[0], (send, tensor.shape)
        output = tensor.new_empty((sum(receive), *tensor.shape[1:]))
        if own := send[self.rank]:
            at, to = sum(send[: self.rank]), sum(receive[: self.rank])
            output.narrow(0, to, own).copy_(tensor.narrow(0, at, own))
        if isinstance(self._channel, EngineChannel):
            row = output.element_size() * math.prod(tensor.shape[1:])
            return self._carried(self._channel, kind, tensor, _laid_out(tensor, send, row), output, _laid_out(output, receive, row))
        sent, received = _bytes(tensor, send), _bytes(output, receive)
        order = [(self.rank + distance) % self.world for distance in range(1, self.world)]
        back = [(self.rank - distance) % self.world for distance in range(1, self.world)]
        out = [Round([Part(peer, sent[peer]) for peer in order])]
        into = [Round([Part(peer, received[peer]) for peer in back])]
        return self._start(kind, out, into, output, tensor)

    def all_gather(self, tensor: Tensor, kind: str) -> Pending:
        tensor = tensor.contiguous()
        output = tensor.new_empty((self.world, *tensor.shape))
        output[self.rank].copy_(tensor)
        size = tensor.numel() * tensor.element_size()
        if isinstance(self._channel, EngineChannel):
            mine = ([tensor.data_ptr()] * self.world, [size] * self.world)
            return self._carried(self._channel, kind, tensor, mine, output, _laid_out(output, [1] * self.world, size))
        blocks = _bytes(output, [1] * self.world)
        around = [(self.rank + distance) % self.world for distance in range(1, self.world)]
        if size < _RING or self._alone_on_machine():
            own = _bytes(tensor[None], [1])[0]
            out = [Round([Part(peer, own) for peer in around])]
            into = [Round([Part(peer, blocks[peer]) for peer in reversed(around)])]
            return self._start(kind, out, into, output, tensor)
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        into = [Round([Part(before, blocks[(self.rank - hop - 1) % self.world])]) for hop in range(self.world - 1)]
        out = [
            Round([Part(after, blocks[(self.rank - hop) % self.world])], after=into[hop - 1] if hop else None)
            for hop in range(self.world - 1)
        ]
        return self._start(kind, out, into, output, tensor)

    def _carried(self, channel: EngineChannel, kind: str, tensor: Tensor, out: _Laid, output: Tensor, into: _Laid) -> Pending:
        sent, received = (sum(sizes) - sizes[self.rank] for _, sizes in (out, into))
        arrival = self.ledger.arrive(kind, sent, received, self._carried_by)
        carry = channel.submit(kind, self._urgent or kind in _URGENT, (tensor, output), *out, *into)
        return Pending(carry, output, arrival, self._carried_by, tensor)

    def _start(self, kind: str, out: list[Round], into: list[Round], output: Tensor, tensor: Tensor) -> Pending:
        sent, received = (sum(p.bytes.numel() for r in rounds for p in r.parts) for rounds in (out, into))
        arrival = self.ledger.arrive(kind, sent, received, self._carried_by)
        transfer = Transfer(kind, out, into, self._urgent or kind in _URGENT, output.device)
        assert isinstance(self._channel, Channel)
        self._channel.submit(transfer)
        return Pending(transfer, output, arrival, self._carried_by, tensor)

    def channel(self, ledger: Side, urgent: bool = False) -> Hostwire:
        assert self._timeout is not None
        made = Hostwire(
            self.device, ledger, self.group, self.control, self.wire, self.shared, timeout=self._timeout, above=self, urgent=urgent
        )
        self._below.append(made)
        return made

    def close(self) -> None:
        for below in self._below:
            below.close()
        self._below = []
        self._channel.close()
        for wire in self._wires:
            wire.close()
            if isinstance(wire, SharedWire):
                wire.release()
        self._ring.close()
        super().close()


def _laid_out(tensor: Tensor, sizes: Sequence[int], row: int) -> _Laid:
    """Addresses and bytes of each part of the first dimension, of `row` bytes each."""
    bytes_ = [size * row for size in sizes]
    return list(accumulate(bytes_[:-1], initial=tensor.data_ptr())), bytes_


def _bytes(tensor: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The bytes of each part of the first dimension."""
    width = tensor.element_size() * (tensor[:1].numel() if tensor.shape[0] else 0)
    return tensor.reshape(-1).view(torch.uint8).split([size * width for size in sizes])
