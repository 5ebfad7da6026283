"""Transport over torch's process groups: gloo on CPU tensors, NCCL on CUDA tensors, control traffic
always over gloo.

Channels, which run beside the compute, are always gloo's: tensors on a GPU go through pinned
memory. NCCL's kernels of several communicators wait for each other on the device, in any order; a
rank that meanwhile loads a kernel or maps memory, which waits for the device, would wait for ever.
And they take multiprocessors from the compute.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.ledger.ledger import Collective, Ledger, ThreadLedger
from freescale.transport.api import Handle, Transport, TransportError
from freescale.transport.channel_pool import Channels, Use

_PINGS = 8
_LONGEST = 1 << 32  # bytes of a control message
_PLANNING = ("counts", "samples")  # kinds
# of a channel: gloo moves a group's bytes by one thread, which is not enough for a GPU's
_LINES = {"cpu": 1, "cuda": 3}


class Waitable(Protocol):
    def wait(self) -> Any: ...


UnderWay = tuple[Waitable, Tensor]  # what is waited for, and the result


def guarded(call: Callable[[], Any], what: str) -> Any:
    """Calls; a failure of torch's groups becomes one line that says what failed."""
    try:
        return call()
    except torch.AcceleratorError:  # a kernel's fault, which the host hears of here
        raise
    except RuntimeError as error:
        # gloo and NCCL begin with the file they were built from and go on with advice: keep what
        # happened.
        reason = (
            re.sub(r"^\[[^\]]*\]\s*", "", f"{error}\n".splitlines()[0])[:120]
            or type(error).__name__
        )
        raise TransportError(f"{what} failed: a rank died or fell silent ({reason})") from error


class _Pending:
    def __init__(
        self, start: Callable[[], UnderWay], collective: Collective, describe: str, use: Use
    ) -> None:
        self._collective, self._describe, self._use = collective, describe, use
        use.begun += 1
        self.path, self.bytes = collective.path, collective.sent
        self._under_way: UnderWay | None = guarded(start, describe)

    def wait(self, host: bool = False) -> Tensor:
        """Once: what was sent, and the result but for the caller, are free afterwards."""
        assert self._under_way is not None, "a collective is waited for once"
        (work, result), self._under_way = self._under_way, None
        with self._collective.wait():
            guarded(work.wait, self._describe)
            if host and result.device.type == "cuda":
                torch.cuda.current_stream(result.device).synchronize()
        self._use.ended += 1
        return result


class _Pairs:
    """AllToAll over gloo, pair by pair: every receive is posted before any send. gloo's own posts
    its sends first, so that the message which lets the other side begin queues behind them: one
    direction after the other, unless all ranks arrive at once."""

    def __init__(
        self,
        output: Tensor,
        tensor: Tensor,
        receive: list[int],
        send: list[int],
        group: dist.ProcessGroup,
    ) -> None:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        into, out = output.split(receive), tensor.split(send)
        self._works: list[dist.Work] = []
        for distance in range(1, world):
            if receive[peer := (rank - distance) % world]:
                self._works.append(_there(dist.irecv(into[peer], group=group, group_src=peer)))
        for distance in range(1, world):
            if send[peer := (rank + distance) % world]:
                self._works.append(_there(dist.isend(out[peer], group=group, group_dst=peer)))
        into[rank].copy_(out[rank])

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _Staged:
    """The same for tensors on a GPU: there and back by the copy engines. The host waits for the
    first copy here."""

    def __init__(
        self,
        output: Tensor,
        tensor: Tensor,
        receive: list[int],
        send: list[int],
        group: dist.ProcessGroup,
    ) -> None:
        sent, self._arrived = (
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (tensor, output)
        )
        sent.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # a core that waits is free for others
        copied.record()
        copied.synchronize()
        self._pairs, self._output = _Pairs(self._arrived, sent, receive, send, group), output

    def wait(self) -> None:
        self._pairs.wait()
        self._output.copy_(self._arrived, non_blocking=True)


def _there(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


class ProcessGroupTransport:
    """`group` carries the tensors; `control` is a gloo group of the same ranks, for what is planned
    on the host as well."""

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
        """`owner`: torch's default group was made for this transport and ends with it. `timeout` is
        that of further channels. `lines`: gloo's groups, whatever the device, that AllToAlls take
        in turn."""
        self._owner, self._timeout = owner, timeout
        self.use, self._channels = Use(), Channels[ProcessGroupTransport]()
        self.about = "transport collective"
        self.lines, self._next_line = max(1, len(lines)), cycle(lines) if lines else None
        self.device = torch.device(device)
        world = group if group is not None else dist.group.WORLD
        assert world is not None, "initialise the process group first (transport.connect does)"
        self.group: dist.ProcessGroup = world
        self.control: dist.ProcessGroup = control if control is not None else world
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.ledger: Ledger | ThreadLedger = ledger or Ledger(self.device)

    def _group(self, tensor: Tensor, kind: str) -> dist.ProcessGroup:
        """What is planned on the host travels beside the rows, not behind them, and never waits for
        a GPU."""
        return self.control if kind in _PLANNING and tensor.device.type == "cpu" else self.group

    def _begin(
        self, kind: str, sent: int, received: int, path: str, start: Callable[[], UnderWay]
    ) -> _Pending:
        collective = self.ledger.begin_collective(kind, sent, received, path)
        return _Pending(
            start,
            collective,
            (f"rank {self.rank}: exchange of {kind} ({sent:,} bytes out, {received:,} in)"),
            self.use,
        )

    def all_to_all(
        self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], kind: str
    ) -> Handle:
        assert tensor.is_contiguous() and sum(send) == tensor.shape[0], (send, tensor.shape)
        output = tensor.new_empty((sum(receive), *tensor.shape[1:]))
        size = tensor.element_size() * (
            tensor[0].numel() if tensor.shape[0] else output[:1].numel()
        )
        sent, received = (
            size * (sum(part) - part[self.rank]) for part in (list(send), list(receive))
        )
        group = self._group(tensor, kind)
        staged = self._next_line is not None and tensor.device.type == "cuda"

        def start() -> UnderWay:
            # Nobody waits at once for what is planned: gloo's threads may post it, where pairs take
            # the caller's time.
            if self._next_line is not None or (
                tensor.device.type == "cpu" and kind not in _PLANNING
            ):
                line = next(self._next_line) if self._next_line is not None else group
                by = _Staged if staged else _Pairs
                return by(output, tensor, list(receive), list(send), line), output
            # The group's own method: what torch's function checks beside it is known here, and
            # takes longer than the call.
            return group.alltoall_base(output, tensor, list(receive), list(send)), output

        return self._begin(
            kind,
            sent,
            received,
            "gloo through pinned memory" if staged else self._path(tensor),
            start,
        )

    def all_gather(self, tensor: Tensor, kind: str) -> Handle:
        output = tensor.new_empty((self.world, *tensor.shape))
        size = tensor.numel() * tensor.element_size() * (self.world - 1)
        group = self._group(tensor, kind)

        def start() -> UnderWay:
            parts = list(output.unbind(0))
            return dist.all_gather(parts, tensor.contiguous(), group=group, async_op=True), output

        return self._begin(kind, size, size, self._path(tensor), start)

    def all_reduce(self, tensor: Tensor, kind: str) -> _Pending:
        # What a ring moves per rank: each of reduce-scatter and all-gather passes (world - 1) /
        # world of the tensor.
        size = 2 * tensor.numel() * tensor.element_size() * (self.world - 1) // self.world
        reduce = lambda: (dist.all_reduce(tensor, group=self.group, async_op=True), tensor)  # noqa: E731
        return self._begin(kind, size, size, self._path(tensor), reduce)

    def broadcast(self, tensor: Tensor, kind: str) -> _Pending:
        # along a tree or a ring most ranks pass it on once
        size = tensor.numel() * tensor.element_size()
        first = self.rank == 0
        give = lambda: (
            dist.broadcast(tensor, group_src=0, group=self.group, async_op=True),
            tensor,
        )  # noqa: E731
        return self._begin(
            kind, size if first else 0, 0 if first else size, self._path(tensor), give
        )

    def _path(self, tensor: Tensor) -> str:
        return "gloo" if tensor.device.type == "cpu" else "nccl"

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        self.use.begun += 1
        gathered = guarded(
            lambda: self._gather_bytes(payload), (f"rank {self.rank}: exchange of control messages")
        )
        self.use.ended += 1
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
        made, lost = self._channels.again(urgent, self.gather_bytes)
        for channel in lost:
            channel._abandon()
        if made is None:
            made = self._open_channel(ledger, urgent)
            self._channels.add(made, urgent, made.use)
        made.ledger = ledger
        return made

    def release(self, channel: Transport) -> None:
        assert isinstance(channel, ProcessGroupTransport)
        if not self._channels.release(channel):
            channel._abandon()

    def _abandon(self) -> None:
        """Of a channel that failed. Groups stay until the transport closes: gloo would wait here
        for what is under way."""

    def _open_channel(self, ledger: ThreadLedger, urgent: bool) -> ProcessGroupTransport:
        """Groups of its own: connections and threads of its own."""
        ranks = dist.get_process_group_ranks(self.group)
        lines = [
            dist.new_group(ranks, timeout=self._timeout, backend="gloo")
            for _ in range(_LINES[self.device.type])
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
        """Ranks of one machine share its monotonic clock; others ping rank 0 in turn and keep the
        quickest answer."""
        return guarded(self._clock_offsets, f"rank {self.rank}: comparison of clocks")

    def _clock_offsets(self) -> tuple[list[int], list[int]]:
        boot = Path("/proc/sys/kernel/random/boot_id")
        machines = self.gather_bytes(boot.read_bytes() if boot.exists() else b"?%d" % self.rank)
        offsets, residuals = [0] * self.world, [0] * self.world
        for rank in range(1, self.world):
            if machines[rank] == machines[0]:
                continue
            measured = self._ping(rank)
            shared = torch.tensor(measured, dtype=torch.int64)
            dist.broadcast(shared, group_src=rank, group=self.control)
            offsets[rank], residuals[rank] = shared.tolist()
        return offsets, residuals

    def _ping(self, rank: int) -> tuple[int, int]:
        """On `rank`: (its offset to rank 0, half the round trip). Rank 0 answers, the others do
        nothing."""
        clock = torch.zeros(1, dtype=torch.int64)
        best = (0, 1 << 62)
        for _ in range(_PINGS):
            if self.rank == 0:
                dist.recv(clock, group_src=rank, group=self.control)
                clock[0] = time.perf_counter_ns()
                dist.send(clock, group_dst=rank, group=self.control)
            elif self.rank == rank:
                begin = time.perf_counter_ns()
                dist.send(clock, group_dst=0, group=self.control)
                dist.recv(clock, group_src=0, group=self.control)
                end = time.perf_counter_ns()
                best = min(
                    best,
                    (int(clock) - (begin + end) // 2, (end - begin) // 2),
                    key=lambda pair: pair[1],
                )
        return best

    def close(self) -> None:
        if self._owner and dist.is_initialized():
            dist.destroy_process_group()
