"""Transport without multiprocessors: what adds no numbers leaves a GPU by its copy engines and
crosses the network from the CPU.

AllToAll goes pair by pair; AllGather as a ring, or pair by pair where it is small or driven in C.
Each goes on a channel over wires (opening.py), driven in C between ranks of one machine and on TCP
streams (engine.py), in Python otherwise (python_channel.py). The part that stays is copied without
the wire. What is summed goes over the process group, NCCL's on GPUs; two CPU ranks sum a little by
themselves. On CPU tensors the same code runs without the copies.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.config import TrainConfig
from freescale.ledger.ledger import Collective, Ledger, ThreadLedger
from freescale.transport.api import Handle, Sizes
from freescale.transport.channel_pool import ExchangeCount
from freescale.transport.hostwire.bindings import explain_missing_engine, load_engine
from freescale.transport.hostwire.engine import EngineChannel, EngineGate
from freescale.transport.hostwire.gate import Gate
from freescale.transport.hostwire.opening import find_neighbours, measure_piece, open_wires
from freescale.transport.hostwire.python_channel import PythonChannel
from freescale.transport.hostwire.steps import URGENT_TIMES, ChannelParts
from freescale.transport.process_group import ProcessGroupTransport

_LEAVES_AT_ONCE = 1 << 20  # bytes
_PIECE_SECONDS = 0.004  # that a piece takes at most on the network: what urgent traffic waits for


class ChannelTransfer(Protocol):
    """A transfer under way. `arrived` is an event after which all of the result is in place; None
    if it is when `wait` returns."""

    arrived: torch.cuda.Event | None

    def wait(self) -> None:
        """Waits; what the current stream does next has the result. Raises TransportError."""


class Channel(Protocol):
    """Transfers in one order, the same on every rank, driven in C (engine.py) or in Python
    (python_channel.py). `urgent` transfers overtake bulk of the same rank. Both methods raise
    TransportError if the channel has failed before."""

    def all_to_all(
        self, kind: str, urgent: bool, tensor: Tensor, send: Sizes, output: Tensor, receive: Sizes
    ) -> ChannelTransfer:
        """Sends the rows of tensor [sum(send), ...] to the ranks and receives
        output [sum(receive), ...], this rank's rows included; both in rank order."""

    def all_gather(
        self, kind: str, urgent: bool, tensor: Tensor, output: Tensor
    ) -> ChannelTransfer:
        """Sends tensor [...] to all ranks and receives output [world, ...], this rank's
        included."""

    def close(self) -> bool:
        """Whether no thread uses its wires and memory any more. The wires stay open."""


@dataclass(eq=False)
class Pending:
    """A transfer under way: the transport's `Handle`."""

    _transfer: ChannelTransfer
    _sent: Tensor
    _output: Tensor
    _collective: Collective
    _exchanges: ExchangeCount | None  # None once it has ended

    def __post_init__(self) -> None:
        self.path, self.bytes = self._collective.path, self._collective.sent
        assert self._exchanges is not None
        self._exchanges.begun += 1

    def wait(self, host: bool = False) -> Tensor:
        with self._collective.wait():
            self._transfer.wait()
            if host and self._transfer.arrived is not None:
                self._transfer.arrived.synchronize()
        if self._exchanges is not None:
            self._exchanges.ended += 1
            self._exchanges = None
        return self._output


class _SumOfTwo:
    """The sum of what two CPU ranks have sent each other: the `Handle` of an AllReduce."""

    def __init__(self, gathering: Pending, tensor: Tensor) -> None:
        self._gathering, self._tensor = gathering, tensor
        self.path, self.bytes = gathering.path, gathering.bytes

    def wait(self, host: bool = False) -> Tensor:
        return torch.add(*self._gathering.wait(host), out=self._tensor)


class HostwireTransport(ProcessGroupTransport):
    """A transport whose AllToAll and AllGather take no multiprocessors. A collective to make.

    Args:
        device: of the tensors.
        ledger: records every collective.
        group: carries what is summed.
        control: a gloo group of the same ranks.
        wire: between machines, gloo, tcp or ucx. With the first two, ranks of one machine share
            memory; UCX finds its own way.
        shared: False: no memory is shared, ranks of one machine use `wire` too.
        owner: torch's default group was made for this transport and ends with it.
        timeout: that a peer may be silent.
        parent: the transport that this one is a channel of.
        urgent: its traffic overtakes that of channels which are not.

    Raises:
        TransportError: on all ranks, if one cannot open what it needs.
    """

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
        parent: HostwireTransport | None = None,
        urgent: bool = False,
    ) -> None:
        super().__init__(device, ledger, group=group, control=control, owner=owner, timeout=timeout)
        self.wire, self.shared, self._urgent = wire, shared, urgent
        self.sums_apart = True
        self.lines = 2  # messages under way: one is copied while the other is on the wire
        self._is_channel = False  # until it can carry its own control messages
        self._gate: Gate = Gate(_PIECE_SECONDS / 4) if parent is None else parent._gate
        self._engine_gate: EngineGate | None = None if parent is None else parent._engine_gate
        self._neighbours: list[int] = (
            find_neighbours(self) if parent is None else parent._neighbours
        )
        shares = shared and wire in ("gloo", "tcp")
        self._wires = open_wires(self, wire, self._neighbours if shares else [], timeout)
        self.piece: int = self._measure_piece(timeout) if parent is None else parent.piece
        self._path_name = self.describe_path()
        if parent is None:
            self._report_missing_engines()
        self._channel = self._make_channel(timeout.total_seconds(), parent is not None)
        self._is_channel = parent is not None

    # ---- opening

    def _make_channel(self, seconds: float, caller_drives: bool) -> Channel:
        """In C where the engine can drive all wires and this rank has it; ranks need not agree."""
        parts = ChannelParts(self.rank, self.device, self._wires.ring, self.piece, seconds)
        wires = self._wires.for_engine()
        library = load_engine() if wires else None
        if library is not None:
            if self._engine_gate is None:
                self._engine_gate = EngineGate(library, self._gate.patience)
            return EngineChannel(library, parts, wires, self._engine_gate)
        name = self.ledger.name if isinstance(self.ledger, ThreadLedger) else "main"
        return PythonChannel(name, parts, self._wires.for_python(), self._gate, caller_drives)

    def _report_missing_engines(self) -> None:
        """Rank 0 prints the ranks on which Python drives what C could. A collective."""
        why = explain_missing_engine() if self._wires.for_engine() else ""
        reasons = {
            rank: text.decode() for rank, text in enumerate(self.gather_bytes(why.encode())) if text
        }
        if reasons and self.rank == 0:
            ranks = f"rank{'s' if len(reasons) > 1 else ''} {', '.join(map(str, reasons))}"
            print(
                f"freescale: Python carries for {ranks}, not the engine in C: "
                f"{next(iter(reasons.values()))}",
                file=sys.stderr,
            )

    def _measure_piece(self, timeout: timedelta) -> int:
        """Bytes of the largest piece of bulk traffic. The gate's patience covers urgent pieces."""
        piece, per_byte = measure_piece(self, self._wires, _PIECE_SECONDS, timeout.total_seconds())
        self._gate.patience = max(self._gate.patience, 3 * URGENT_TIMES * piece * per_byte)
        return piece

    # ---- the protocol

    def describe_path(self) -> str:
        """What carries bytes from this rank to others."""
        routes = enumerate(self._wires.routes)
        names = sorted({route.path for peer, route in routes if peer != self.rank})
        return f"hostwire: {' and '.join(names) or 'nothing to carry'}"

    def all_to_all(self, tensor: Tensor, send: Sizes, receive: Sizes, kind: str) -> Pending:
        assert tensor.is_contiguous() and sum(send) == tensor.shape[0], (send, tensor.shape)
        output = tensor.new_empty((sum(receive), *tensor.shape[1:]))
        row = tensor.element_size() * math.prod(tensor.shape[1:])
        sent, received = (row * (sum(sizes) - sizes[self.rank]) for sizes in (send, receive))
        collective = self.ledger.begin_collective(kind, sent, received, self._path_name)
        transfer = self._channel.all_to_all(kind, self._urgent, tensor, send, output, receive)
        return Pending(transfer, tensor, output, collective, self.exchanges)

    def all_gather(self, tensor: Tensor, kind: str) -> Pending:
        return self._start_gathering(tensor, kind, self._urgent)

    def _start_gathering(self, tensor: Tensor, kind: str, urgent: bool) -> Pending:
        tensor = tensor.contiguous()
        output = tensor.new_empty((self.world, *tensor.shape))
        size = tensor.numel() * tensor.element_size() * (self.world - 1)
        collective = self.ledger.begin_collective(kind, size, size, self._path_name)
        transfer = self._channel.all_gather(kind, urgent, tensor, output)
        return Pending(transfer, tensor, output, collective, self.exchanges)

    def all_reduce(self, tensor: Tensor, kind: str) -> Handle:
        size = tensor.numel() * tensor.element_size()
        # A sum of two numbers has the same bits in either order. What leaves at once needs no
        # thread beside this one; more would not travel before it is waited for. Urgent: a rank
        # that waits for a sum computes nothing.
        if self.world == 2 and tensor.is_cpu and size <= _LEAVES_AT_ONCE:
            return _SumOfTwo(self._start_gathering(tensor, kind, urgent=True), tensor)
        return super().all_reduce(tensor, kind)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Of a channel over the channel: the thread that has the process group is another."""
        if self._is_channel:
            return list(self.all_gather(tensor, "counts").wait())
        return super()._gather(tensor)

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
            parent=self,
            urgent=urgent,
        )

    def _abandon(self) -> None:
        self.close()

    def close(self) -> None:
        for channel in self._channels.list_all():
            channel.close()
        if self._channel.close():
            self._wires.close()
        super().close()
