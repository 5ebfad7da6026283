"""Transport without multiprocessors: what adds no numbers leaves a GPU by its copy engines and
crosses the network from the CPU.

AllToAll goes pair by pair, AllGather as a ring (pair by pair where it is small, or carried in C),
each on a channel over wires (opening.py): in C between ranks of one machine and on TCP streams
(engine.py), in Python otherwise (channel.py). The part that stays is copied without the wire. What
is summed goes over the process group, NCCL's on GPUs. On CPU tensors the same code runs without the
copies.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.config import TrainConfig
from freescale.ledger.ledger import Collective, Ledger, ThreadLedger
from freescale.transport.channel_pool import Use
from freescale.transport.hostwire.calls import calls, lacking
from freescale.transport.hostwire.channel import Channel
from freescale.transport.hostwire.engine import Carry, EngineChannel, EngineGate
from freescale.transport.hostwire.gate import Gate
from freescale.transport.hostwire.opening import network_piece, open_wires, same_machine
from freescale.transport.hostwire.steps import URGENT_TIMES
from freescale.transport.hostwire.transfer import Part, Round, Transfer, recorded
from freescale.transport.hostwire.wires.shared import SharedWire
from freescale.transport.hostwire.wires.tcp import TcpWire
from freescale.transport.process_group import ProcessGroupTransport

_PIECE_SECONDS = 0.004  # that a piece takes at most on the network: what urgent traffic waits for
_RING = 256 << 10  # bytes that every rank sends: below, an AllGather goes pair by pair
_Laid = tuple[list[int], list[int]]  # by rank: addresses, bytes


class Pending:
    """A transfer under way."""

    def __init__(
        self,
        transfer: Transfer | Carry,
        output: Tensor,
        collective: Collective,
        path: str,
        sent: Tensor,
        use: Use,
    ) -> None:
        self._transfer, self._output, self._collective, self._sent = (
            transfer,
            output,
            collective,
            sent,
        )
        self.path, self.bytes = path, collective.sent
        self._use: Use | None = use
        use.begun += 1

    def kept(self, to: Tensor, part: Tensor) -> None:
        """Copies what does not travel, beside what does: that need not wait for it."""
        to.copy_(part)
        self._transfer.arrived = recorded(to.device)

    def wait(self, host: bool = False) -> Tensor:
        with self._collective.wait():
            self._transfer.wait()
            if host and self._transfer.arrived is not None:
                self._transfer.arrived.synchronize()
        if self._use is not None:
            self._use.ended += 1
            self._use = None
        return self._output


class HostwireTransport(ProcessGroupTransport):
    """`wire`: between machines, gloo, tcp or ucx. With the first two ranks of one machine share
    memory; UCX finds its own way."""

    def __init__(
        self,
        device: torch.device | str,
        ledger: Ledger | ThreadLedger,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        wire: str = "gloo",
        shared: bool = True,
        owner: bool = False,
        timeout: timedelta = timedelta(seconds=TrainConfig.timeout),
        above: HostwireTransport | None = None,
        urgent: bool = False,
    ) -> None:
        """`shared`: memory, between ranks of one machine. `above`: the transport that this one is a
        channel of. A collective."""
        super().__init__(device, ledger, group=group, control=control, owner=owner, timeout=timeout)
        self.wire, self.shared, self._urgent = wire, shared, urgent
        self.lines = 2  # messages under way: one is copied while the other is on the wire
        self._opened = False
        seconds = timeout.total_seconds()
        self._gate: Gate = above._gate if above is not None else Gate(_PIECE_SECONDS / 4)
        self._engine_gate: EngineGate | None = above._engine_gate if above is not None else None
        self._neighbours: list[int] = above._neighbours if above is not None else same_machine(self)
        opened = open_wires(
            self, wire, self._neighbours if shared and wire in ("gloo", "tcp") else [], timeout
        )
        self._ring, self._wires, self._routes = opened.ring, opened.wires, opened.routes
        self.piece: int = above.piece if above is not None else self._agreed_piece(seconds)
        self._carried_by = self.path_of()
        if above is None:
            self._tell_who_lacks()
        self._channel: Channel | EngineChannel = self._engine(seconds) or self._python(
            seconds, patient=above is not None
        )
        self._opened = above is not None

    # ---- opening

    def _engine(self, seconds: float) -> EngineChannel | None:
        """Where all others share memory with this rank, if it has the engine (ranks need not agree
        on it), or are on streams."""
        wires = [wire for wire in self._wires if isinstance(wire, SharedWire | TcpWire)]
        found = calls() if self._could_be_compiled() else None
        if found is None:
            return None
        if self._engine_gate is None:
            self._engine_gate = EngineGate(found, self._gate.patience)
        return EngineChannel(
            found, self.rank, self.device, wires, self._ring, self._engine_gate, self.piece, seconds
        )

    def _could_be_compiled(self) -> bool:
        return bool(self._wires) and all(
            isinstance(wire, SharedWire | TcpWire) for wire in self._wires
        )

    def _tell_who_lacks(self) -> None:
        """Ranks that Python carries for where C could: one line, of rank 0. A collective."""
        why = lacking() if self._could_be_compiled() else ""
        reasons = {
            rank: text.decode() for rank, text in enumerate(self.gather_bytes(why.encode())) if text
        }
        if reasons and self.rank == 0:
            ranks = f"rank{'s' if len(reasons) > 1 else ''} {', '.join(map(str, reasons))}"
            print(
                (
                    f"freescale: Python carries for {ranks}, not the engine in C: "
                    f"{next(iter(reasons.values()))}"
                ),
                file=sys.stderr,
            )

    def _python(self, seconds: float, patient: bool) -> Channel:
        name = self.ledger.name if isinstance(self.ledger, ThreadLedger) else "main"
        routes = [route for route in self._routes if not isinstance(route, TcpWire)]
        return Channel(
            name,
            self.rank,
            self.device,
            routes,
            self._ring,
            self._gate,
            self.piece,
            seconds,
            patient,
        )

    def _agreed_piece(self, seconds: float) -> int:
        piece, per_byte = network_piece(self, self._routes, _PIECE_SECONDS, seconds)
        self._gate.patience = max(self._gate.patience, 3 * URGENT_TIMES * piece * per_byte)
        return piece

    def _alone_on_machine(self) -> bool:
        """No rank is elsewhere: the same answer on every rank."""
        return self.world > 1 and all(isinstance(route, SharedWire) for route in self._routes)

    # ---- the protocol

    def path_of(self) -> str:
        """What carries bytes from this rank to others."""
        names = (
            sorted({self._routes[peer].path for peer in range(self.world) if peer != self.rank})
            if self.world > 1
            else []
        )
        return f"hostwire: {' and '.join(names) or 'nothing to carry'}"

    def all_to_all(
        self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], kind: str
    ) -> Pending:
        assert tensor.is_contiguous() and sum(send) == tensor.shape[0], (send, tensor.shape)
        output = tensor.new_empty((sum(receive), *tensor.shape[1:]))
        at, to, own = sum(send[: self.rank]), sum(receive[: self.rank]), send[self.rank]
        if isinstance(self._channel, EngineChannel):
            row = output.element_size() * math.prod(tensor.shape[1:])
            laid = _laid_out(tensor, send, row), output, _laid_out(output, receive, row)
            pending = self._carried(self._channel, kind, tensor, *laid)
            pending.kept(output.narrow(0, to, own), tensor.narrow(0, at, own))
            return pending
        if own:
            output.narrow(0, to, own).copy_(tensor.narrow(0, at, own))
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
            return self._carried(
                self._channel, kind, tensor, mine, output, _laid_out(output, [1] * self.world, size)
            )
        blocks = _bytes(output, [1] * self.world)
        around = [(self.rank + distance) % self.world for distance in range(1, self.world)]
        if size < _RING or self._alone_on_machine():
            own = _bytes(tensor[None], [1])[0]
            out = [Round([Part(peer, own) for peer in around])]
            into = [Round([Part(peer, blocks[peer]) for peer in reversed(around)])]
            return self._start(kind, out, into, output, tensor)
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        into = [
            Round([Part(before, blocks[(self.rank - hop - 1) % self.world])])
            for hop in range(self.world - 1)
        ]
        out = [
            Round(
                [Part(after, blocks[(self.rank - hop) % self.world])],
                after=into[hop - 1] if hop else None,
            )
            for hop in range(self.world - 1)
        ]
        return self._start(kind, out, into, output, tensor)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Of a channel over the channel: the thread that has the process group is another."""
        return (
            list(self.all_gather(tensor, "counts").wait())
            if self._opened
            else super()._gather(tensor)
        )

    def _carried(
        self,
        channel: EngineChannel,
        kind: str,
        tensor: Tensor,
        out: _Laid,
        output: Tensor,
        into: _Laid,
    ) -> Pending:
        sent, received = (sum(sizes) - sizes[self.rank] for _, sizes in (out, into))
        collective = self.ledger.begin_collective(kind, sent, received, self._carried_by)
        carry = channel.submit(kind, self._urgent, (tensor, output), *out, *into)
        return Pending(carry, output, collective, self._carried_by, tensor, self.use)

    def _start(
        self, kind: str, out: list[Round], into: list[Round], output: Tensor, tensor: Tensor
    ) -> Pending:
        sent, received = (
            sum(p.bytes.numel() for r in rounds for p in r.parts) for rounds in (out, into)
        )
        collective = self.ledger.begin_collective(kind, sent, received, self._carried_by)
        transfer = Transfer(kind, out, into, self._urgent, output.device)
        assert isinstance(self._channel, Channel)
        self._channel.submit(transfer)
        return Pending(transfer, output, collective, self._carried_by, tensor, self.use)

    def _open_channel(self, ledger: ThreadLedger, urgent: bool) -> HostwireTransport:
        assert self._timeout is not None
        return HostwireTransport(
            self.device,
            ledger,
            self.group,
            self.control,
            self.wire,
            self.shared,
            timeout=self._timeout,
            above=self,
            urgent=urgent,
        )

    def _abandon(self) -> None:
        self.close()

    def close(self) -> None:
        for channel in self._channels.all():
            channel.close()
        if self._channel.close():
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
