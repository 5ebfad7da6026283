"""Transport without multiprocessors: copy engines move data off a GPU and the CPU moves it across
the network, except what is summed.

AllToAll and AllGather go on a channel over wires (opening.py): driven by the engine in C between
ranks of one machine and on TCP streams (engine.py), by Python over UCX (ucx_channel.py). The part
that stays on a rank is copied without the wire. Sums go over the process group, NCCL's on GPUs;
two CPU ranks exchange small tensors and add them up themselves. On CPU tensors the same code runs
without the copies.
"""

from __future__ import annotations

import math
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.config import TrainConfig
from freescale.ledger.ledger import Ledger, ThreadLedger
from freescale.transport.api import Handle, Sizes
from freescale.transport.hostwire.bindings import load_engine
from freescale.transport.hostwire.channel import URGENT_TIMES, ChannelParts
from freescale.transport.hostwire.engine import EngineChannel, EngineGate
from freescale.transport.hostwire.opening import find_neighbours, measure_piece, open_wires
from freescale.transport.hostwire.ucx_channel import Gate, UcxChannel
from freescale.transport.hostwire.wires.ucx import UcxWire
from freescale.transport.process_group import Pending, ProcessGroupTransport, Started

_LEAVES_AT_ONCE = 1 << 20  # bytes
_PIECE_SECONDS = 0.004  # network time of a piece, at most: how long urgent traffic waits for it


class _SumOfTwo:
    """The sum of what two CPU ranks have sent each other: the `Handle` of an AllReduce."""

    def __init__(self, gathering: Pending, tensor: Tensor) -> None:
        self._gathering, self._tensor = gathering, tensor
        self.path, self.bytes = gathering.path, gathering.bytes

    def wait(self, host: bool = False) -> Tensor:
        return torch.add(*self._gathering.wait(host), out=self._tensor)


class HostwireTransport(ProcessGroupTransport):
    """A transport whose AllToAll and AllGather take no multiprocessors. A collective to make.
    TransportError, on all ranks, if one cannot open what it needs. Arguments are those of
    `ProcessGroupTransport`, with a `timeout` for how long a peer may be silent. `wire`: tcp, which
    needs the engine, or ucx. With tcp, ranks of one machine share memory, unless `shared` is False;
    UCX finds its own way. `parent`: the transport that this one is a channel of. `urgent`: it
    overtakes other channels."""

    def __init__(
        self,
        device: torch.device | str,
        ledger: Ledger | ThreadLedger,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        wire: str = "tcp",
        shared: bool = True,
        owner: bool = False,
        timeout: timedelta = timedelta(seconds=TrainConfig.timeout),
        parent: HostwireTransport | None = None,
        urgent: bool = False,
    ) -> None:
        assert wire in ("tcp", "ucx"), wire
        super().__init__(device, ledger, group=group, control=control, owner=owner, timeout=timeout)
        self.wire, self.shared, self._urgent = wire, shared, urgent
        self.sums_apart = True
        self.lines = 2  # messages under way: one is copied while the other is on the wire
        self._is_channel = False  # until it can carry its own control messages
        self._neighbours: list[int] = (
            find_neighbours(self) if parent is None else parent._neighbours
        )
        shares = shared and wire == "tcp"
        self._wires = open_wires(self, wire, self._neighbours if shares else [], timeout)
        self._path_name = self.describe_path()
        self.piece: int
        self._gate: Gate | EngineGate
        self.piece, self._gate = (
            self._measure(timeout) if parent is None else (parent.piece, parent._gate)
        )
        self._channel = self._make_channel(timeout.total_seconds())
        self._is_channel = parent is not None

    # ---- opening

    def _measure(self, timeout: timedelta) -> tuple[int, Gate | EngineGate]:
        """Bytes of the largest piece of bulk traffic, and the gate of this rank's channels. Its
        patience covers urgent pieces. A collective."""
        piece, per_byte = measure_piece(self, self._wires, _PIECE_SECONDS, timeout.total_seconds())
        patience = max(_PIECE_SECONDS / 4, 3 * URGENT_TIMES * piece * per_byte)
        library = load_engine() if self.wire == "tcp" else None
        return piece, Gate(patience) if library is None else EngineGate(library, patience)

    def _make_channel(self, seconds: float) -> EngineChannel | UcxChannel:
        parts = ChannelParts(self.rank, self.device, self._wires.ring, self.piece, seconds)
        network, gate = self._wires.network, self._gate
        if isinstance(network, UcxWire):
            assert isinstance(gate, Gate)
            name = self.ledger.name if isinstance(self.ledger, ThreadLedger) else "main"
            return UcxChannel(name, parts, self.world, network, gate)
        assert isinstance(gate, EngineGate)
        wires = [wire for wire in (self._wires.shared, network) if wire is not None]
        return EngineChannel(parts, wires, gate)

    # ---- the protocol

    def describe_path(self) -> str:
        """What carries bytes from this rank to others."""
        return f"hostwire: {self._wires.describe()}"

    def all_to_all(self, tensor: Tensor, send: Sizes, receive: Sizes, kind: str) -> Pending:
        assert tensor.is_contiguous() and sum(send) == tensor.shape[0], (send, tensor.shape)
        output = tensor.new_empty((sum(receive), *tensor.shape[1:]))
        row = tensor.element_size() * math.prod(tensor.shape[1:])
        sent, received, far = self._count_bytes(row, send, receive)

        def start() -> Started:
            channel = self._channel
            return channel.all_to_all(kind, self._urgent, tensor, send, output, receive), output

        return self._begin(kind, sent, received, self._path_name, start, far)

    def all_gather(self, tensor: Tensor, kind: str) -> Pending:
        return self._start_gathering(tensor, kind, self._urgent)

    def _start_gathering(self, tensor: Tensor, kind: str, urgent: bool) -> Pending:
        tensor = tensor.contiguous()
        output = tensor.new_empty((self.world, *tensor.shape))
        size = tensor.numel() * tensor.element_size() * (self.world - 1)

        def start() -> Started:
            return self._channel.all_gather(kind, urgent, tensor, output), output

        return self._begin(kind, size, size, self._path_name, start)

    def all_reduce(self, tensor: Tensor, kind: str) -> Handle:
        size = tensor.numel() * tensor.element_size()
        # A sum of two numbers has the same bits in either order. A small tensor leaves at once;
        # a larger one would not travel before it is waited for. Urgent: a rank that waits for a
        # sum computes nothing.
        if self.world == 2 and tensor.is_cpu and size <= _LEAVES_AT_ONCE:
            return _SumOfTwo(self._start_gathering(tensor, kind, urgent=True), tensor)
        return super().all_reduce(tensor, kind)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """A channel gathers over itself: the process group belongs to another thread."""
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
