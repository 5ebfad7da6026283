"""Transport over torch's process groups: gloo on CPU tensors, NCCL on CUDA tensors, control traffic
always over gloo.

Channels, which run alongside compute, are gloo's: tensors on a GPU go through pinned memory. NCCL's
kernels of several communicators wait for each other on the device and take its multiprocessors; a
rank that meanwhile loads a kernel or maps memory would wait for ever.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.ledger.ledger import Collective, Ledger, ThreadLedger
from freescale.streams import current_stream, record_event
from freescale.transport.api import Gather, Handle, Sizes, Transport, TransportError
from freescale.transport.channel_pool import ChannelPool, ExchangeCount
from freescale.transport.descriptors import LINES
from freescale.transport.signs_of_life import SignsOfLife

_LONGEST = 1 << 32  # bytes of a control message
_PLANNING = ("counts", "samples")  # kinds
_T = TypeVar("_T")


_PINGS = 8


def measure_clock_offsets(group: dist.ProcessGroup, gather: Gather) -> tuple[list[int], list[int]]:
    """As `Transport.clock_offsets`. Ranks of one machine share its monotonic clock; others ping
    rank 0 in turn and keep the quickest answer. `group` is of gloo."""
    own, world = dist.get_rank(group), dist.get_world_size(group)
    boot = Path("/proc/sys/kernel/random/boot_id")
    machines = gather(boot.read_bytes() if boot.exists() else b"?%d" % own)
    offsets, residuals = [0] * world, [0] * world
    for rank in range(1, world):
        if machines[rank] == machines[0]:
            continue
        shared = torch.tensor(_ping(group, own, rank), dtype=torch.int64)
        dist.broadcast(shared, group_src=rank, group=group)
        offsets[rank], residuals[rank] = shared.tolist()
    return offsets, residuals


def _ping(group: dist.ProcessGroup, own: int, rank: int) -> tuple[int, int]:
    """On `rank`: (its offset to rank 0, which answers, half the round trip)."""
    clock = torch.zeros(1, dtype=torch.int64)
    best = (0, 1 << 62)
    for _ in range(_PINGS):
        if own == 0:
            dist.recv(clock, group_src=rank, group=group)
            clock[0] = time.perf_counter_ns()
            dist.send(clock, group_dst=rank, group=group)
        elif own == rank:
            begin = time.perf_counter_ns()
            dist.send(clock, group_dst=0, group=group)
            dist.recv(clock, group_src=0, group=group)
            end = time.perf_counter_ns()
            answer = (int(clock) - (begin + end) // 2, (end - begin) // 2)
            best = min(best, answer, key=lambda pair: pair[1])
    return best


class Waitable(Protocol):
    def wait(self) -> Any: ...


Started = tuple[Waitable, Tensor]  # what is waited for, and the result


def call_guarded(call: Callable[[], _T], what: str) -> _T:
    """Calls; a failure of torch's groups becomes a TransportError that says `what` failed."""
    try:
        return call()
    except (TransportError, torch.AcceleratorError):  # a kernel's fault, which the host hears of
        raise
    except RuntimeError as error:
        # gloo and NCCL begin with the file they were built from and go on with advice: keep what
        # happened.
        first = re.sub(r"^\[[^\]]*\]\s*", "", f"{error}\n".splitlines()[0])
        reason = first[:120] or type(error).__name__
        raise TransportError(f"{what} failed: a rank died or fell silent ({reason})") from error


@dataclass(eq=False)
class Pending:
    """A collective under way: the transport's `Handle`."""

    _start: InitVar[Callable[[], Started]]
    _collective: Collective
    _describe: str
    _exchanges: ExchangeCount

    def __post_init__(self, start: Callable[[], Started]) -> None:
        self._exchanges.begun += 1
        self.path, self.bytes = self._collective.path, self._collective.sent
        self._started: Started | None = call_guarded(start, self._describe)

    def wait(self, host: bool = False) -> Tensor:
        assert self._started is not None, "a collective is waited for once"
        (work, result), self._started = self._started, None  # drops the reference to what was sent
        with self._collective.wait():
            call_guarded(work.wait, self._describe)
            if host and result.device.type == "cuda":
                # hostwire's transfers know when the part that stays on this rank is there
                arrived = getattr(work, "arrived", current_stream(result.device))
                if arrived is not None:
                    arrived.synchronize()
        self._exchanges.ended += 1
        return result


def _require(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


class ProcessGroupTransport:
    """`group` carries the tensors; `control`, of gloo, what is planned on the host as well."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        ledger: Ledger | ThreadLedger | None = None,
        group: dist.ProcessGroup | None = None,
        control: dist.ProcessGroup | None = None,
        owner: bool = False,
        timeout: timedelta | None = None,
        lines: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        """`owner`: torch's default group ends with this transport. `timeout`: of further channels.
        `lines`: gloo's groups, whatever the device, that AllToAlls take in turn."""
        self._owner, self._timeout = owner, timeout
        self.exchanges, self._channels = ExchangeCount(), ChannelPool[ProcessGroupTransport]()
        self.about = "transport collective"
        self.signs: SignsOfLife | None = None
        self.lines, self._next_line = max(1, len(lines)), cycle(lines) if lines else None
        self.device = torch.device(device)
        self.sums_apart, self.rdma = False, False
        world = group if group is not None else dist.group.WORLD
        assert world is not None, "initialise the process group first (transport.connect does)"
        self.group: dist.ProcessGroup = world
        self.control: dist.ProcessGroup = control if control is not None else world
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.machines: Sequence[int] = range(self.world)
        self.ledger: Ledger | ThreadLedger = ledger or Ledger(self.device)

    def _group(self, tensor: Tensor, kind: str) -> dist.ProcessGroup:
        """What is planned on the host has its own group: it waits for neither rows nor a GPU."""
        return self.control if kind in _PLANNING and tensor.device.type == "cpu" else self.group

    def _begin(
        self,
        kind: str,
        sent: int,
        received: int,
        path: str,
        start: Callable[[], Started],
        far: int = 0,
    ) -> Pending:
        collective = self.ledger.begin_collective(kind, sent, received, path)
        collective.far = far
        return Pending(
            start,
            collective,
            (f"rank {self.rank}: exchange of {kind} ({sent:,} bytes out, {received:,} in)"),
            self.exchanges,
        )

    def all_to_all(self, tensor: Tensor, send: Sizes, receive: Sizes, kind: str) -> Handle:
        assert tensor.is_contiguous() and sum(send) == tensor.shape[0], (send, tensor.shape)
        output = tensor.new_empty((sum(receive), *tensor.shape[1:]))
        size = tensor.element_size() * (
            tensor[0].numel() if tensor.shape[0] else output[:1].numel()
        )
        bytes_ = self._count_bytes(size, send, receive)
        group = self._group(tensor, kind)
        staged = self._next_line is not None and tensor.device.type == "cuda"

        def start() -> Started:
            # Nobody waits at once for what is planned: gloo's threads may post it, where pairs take
            # the caller's time.
            if self._next_line is not None or (
                tensor.device.type == "cpu" and kind not in _PLANNING
            ):
                line = next(self._next_line) if self._next_line is not None else group
                exchange = StagedAllToAll if staged else PairwiseAllToAll
                return exchange(output, tensor, list(receive), list(send), line), output
            # The group's own method: the checks of torch's function take longer
            # than the call, and their result is known here.
            return group.alltoall_base(output, tensor, list(receive), list(send)), output

        path = "gloo through pinned memory" if staged else self._path(tensor)
        return self._begin(kind, bytes_[0], bytes_[1], path, start, bytes_[2])

    def _count_bytes(self, row: int, send: Sizes, receive: Sizes) -> tuple[int, int, int]:
        """Bytes that leave this rank, that it receives, and that leave its machine."""
        sent, received = (row * (sum(sizes) - sizes[self.rank]) for sizes in (send, receive))
        own = self.machines[self.rank]
        far = sum(size for size, there in zip(send, self.machines, strict=True) if there != own)
        return sent, received, row * far

    def all_gather(self, tensor: Tensor, kind: str) -> Handle:
        output = tensor.new_empty((self.world, *tensor.shape))
        size = tensor.numel() * tensor.element_size() * (self.world - 1)
        group = self._group(tensor, kind)

        def start() -> Started:
            parts = list(output.unbind(0))
            work = dist.all_gather(parts, tensor.contiguous(), group=group, async_op=True)
            return _require(work), output

        return self._begin(kind, size, size, self._path(tensor), start)

    def all_reduce(self, tensor: Tensor, kind: str) -> Handle:
        # What a ring moves per rank: each of reduce-scatter and all-gather passes (world - 1) /
        # world of the tensor.
        size = 2 * tensor.numel() * tensor.element_size() * (self.world - 1) // self.world

        def start() -> Started:
            return _require(dist.all_reduce(tensor, group=self.group, async_op=True)), tensor

        return self._begin(kind, size, size, self._path(tensor), start)

    def broadcast(self, tensor: Tensor, kind: str) -> Pending:
        # along a tree or a ring most ranks pass it on once
        size = tensor.numel() * tensor.element_size()
        sent, received = (size, 0) if self.rank == 0 else (0, size)

        def start() -> Started:
            work = dist.broadcast(tensor, group_src=0, group=self.group, async_op=True)
            return _require(work), tensor

        return self._begin(kind, sent, received, self._path(tensor), start)

    def _path(self, tensor: Tensor) -> str:
        return "gloo" if tensor.device.type == "cpu" else "nccl"

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        self.exchanges.begun += 1
        gathered = call_guarded(
            lambda: self._gather_bytes(payload), (f"rank {self.rank}: exchange of control messages")
        )
        self.exchanges.ended += 1
        return gathered

    def _gather_bytes(self, payload: bytes) -> list[bytes]:
        sizes = [int(size) for size in self._gather(torch.tensor([len(payload)]))]
        for rank, size in enumerate(sizes):
            if not 0 <= size <= _LONGEST:
                raise TransportError(
                    f"rank {self.rank}: rank {rank} names a control message of {size:,} bytes"
                )
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        return [
            part[:size].numpy().tobytes()
            for part, size in zip(self._gather(mine), sizes, strict=True)
        ]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's, on the host."""
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor, group=self.control)
        return parts

    def channel(self, ledger: ThreadLedger, urgent: bool = False) -> ProcessGroupTransport:
        made, lost = self._channels.reuse(urgent, self.gather_bytes)
        for channel in lost:
            channel._abandon()
        if made is None:
            made = self._open_channel(ledger, urgent)
            self._channels.add(made, urgent, made.exchanges)
        made.ledger, made.machines = ledger, self.machines
        return made

    def open_control(self) -> ProcessGroupTransport:
        """Another transport over the same ranks, for the control messages of another thread. It
        stays until this one closes. A collective."""
        ranks = dist.get_process_group_ranks(self.group)
        group = dist.new_group(ranks, timeout=self._timeout, backend="gloo")
        return ProcessGroupTransport("cpu", group=group, control=group, timeout=self._timeout)

    def release(self, channel: Transport) -> None:
        assert isinstance(channel, ProcessGroupTransport)
        if not self._channels.release(channel):
            channel._abandon()

    def _abandon(self) -> None:
        """A channel that failed keeps its groups: gloo would wait here for what is under way."""

    def _open_channel(self, ledger: ThreadLedger, urgent: bool) -> ProcessGroupTransport:
        """Groups of its own: connections and threads of its own."""
        ranks = dist.get_process_group_ranks(self.group)
        lines = [
            dist.new_group(ranks, timeout=self._timeout, backend="gloo")
            for _ in range(LINES[self.device.type])
        ]
        return ProcessGroupTransport(
            self.device,
            ledger,
            group=lines[0],
            control=lines[0],
            timeout=self._timeout,
            lines=lines,
        )

    def clock_offsets(self) -> tuple[list[int], list[int]]:
        return call_guarded(
            lambda: measure_clock_offsets(self.control, self.gather_bytes),
            f"rank {self.rank}: comparison of clocks",
        )

    def close(self) -> None:
        if self.signs is not None:
            self.signs.close()
        if self._owner and dist.is_initialized():
            dist.destroy_process_group()


class PairwiseAllToAll:
    """Every receive is posted before any send. gloo's own AllToAll posts its sends first: one
    direction after the other, unless all ranks arrive at once. output [sum(receive), ...], tensor
    [sum(send), ...]; `group` is gloo's."""

    def __init__(
        self, output: Tensor, tensor: Tensor, receive: Sizes, send: Sizes, group: dist.ProcessGroup
    ) -> None:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        into, out = torch.split(output, list(receive)), torch.split(tensor, list(send))
        self._works: list[dist.Work] = []
        for distance in range(1, world):
            if receive[peer := (rank - distance) % world]:
                self._add(dist.irecv(into[peer], group=group, group_src=peer))
        for distance in range(1, world):
            if send[peer := (rank + distance) % world]:
                self._add(dist.isend(out[peer], group=group, group_dst=peer))
        into[rank].copy_(out[rank])

    def _add(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank is in the group"
        self._works.append(work)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class StagedAllToAll:
    """The same for tensors on a GPU, through pinned memory: there and back by the copy engines. The
    host waits for the first copy when this is made."""

    def __init__(
        self, output: Tensor, tensor: Tensor, receive: Sizes, send: Sizes, group: dist.ProcessGroup
    ) -> None:
        sent, self._arrived = (
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (tensor, output)
        )
        sent.copy_(tensor, non_blocking=True)
        copied = record_event(blocking=True)  # a core that waits is free for others
        copied.synchronize()
        self._exchange = PairwiseAllToAll(self._arrived, sent, receive, send, group)
        self._output = output

    def wait(self) -> None:
        self._exchange.wait()
        self._output.copy_(self._arrived, non_blocking=True)
