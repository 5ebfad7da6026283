"""AllReduce out of exchanges that add nothing: every rank receives its partition of all ranks'
numbers, sums it, and sends the sum to all.

    AllToAll: partition r of every rank -> rank r
    sum, in rank order
    AllToAll: partition r of the sum -> all ranks

For transports that exchange without multiprocessors (hostwire): only a few additions are left on
the device. It moves as many bytes as a ring. The order of the sum is that of the ranks, whatever
the size of a message, so no bit depends on how gradients are partitioned. Two ranks send each other
all their numbers and both sum: as many bytes, one round instead of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.dispatch.rows import sum_in_order
from freescale.ledger.ledger import Collective, Ledger
from freescale.pipeline.lane import Job, Lane
from freescale.transport.api import Handle, Transport


class PartitionedAllReduce:
    """Sums one after another: on a lane of its own, while the main thread computes. Or on the
    thread that waits for them, if there is nothing to compute meanwhile: handing over would cost
    as much as the sum."""

    def __init__(self, transport: Transport, lane: bool = True) -> None:
        """With a `lane`, opens a channel: a collective."""
        assert isinstance(transport.ledger, Ledger)
        self.ledger, self.gather_bytes = transport.ledger, transport.gather_bytes
        self.transport = transport
        # urgent: a rank that waits for a sum computes nothing
        self.lane = Lane("dense", transport, urgent=True) if lane else None

    def all_reduce(self, tensor: Tensor, kind: str) -> Handle:
        """As `Transport.all_reduce`; tensor [n]."""
        if self.lane is None:
            return _Sum(self.transport, tensor, kind)
        return _LaneSum(self.ledger, self.lane, tensor, kind)

    def rest(self) -> None:
        if self.lane is not None:
            self.lane.rest()

    def close(self) -> None:
        if self.lane is not None:
            self.lane.close()


class _Sum:
    """A sum in place. The first exchange is under way; `wait` does the rest."""

    def __init__(self, transport: Transport, tensor: Tensor, kind: str) -> None:
        self._transport, self._tensor, self._kind = transport, tensor, kind
        rank, world = transport.rank, transport.world
        self._sizes = partition(tensor.numel(), world)
        self._mine = [self._sizes[rank]] * world
        self._came = (
            transport.all_gather(tensor, kind)
            if world == 2
            else transport.all_to_all(tensor, self._sizes, self._mine, kind)
        )
        self.path, self.bytes = self._came.path, self._came.bytes

    def wait(self, host: bool = False) -> Tensor:
        came, tensor = self._came.wait(host), self._tensor
        if self._transport.world == 2:
            return torch.add(*came, out=tensor)
        world = self._transport.world
        total = sum_in_order(came.view(world, self._mine[0]), copies=world)  # one for each rank
        summed = self._transport.all_to_all(total, self._mine, self._sizes, self._kind)
        self.bytes += summed.bytes
        return tensor.copy_(summed.wait(host))


class _LaneSum:
    def __init__(self, ledger: Ledger, lane: Lane, tensor: Tensor, kind: str) -> None:
        self._ledger, self._lane, self._tensor, self._kind = ledger, lane, tensor, kind
        self._collectives: list[Collective] = []
        self.path, self.bytes = "", 0  # known once it has travelled
        self._job: Job = lane.submit(self._run, [tensor])

    def _run(self) -> None:
        _Sum(self._lane.transport, self._tensor, self._kind).wait()
        self._collectives = self._lane.side.take()
        self.path = self._collectives[0].path
        self.bytes = sum(collective.sent for collective in self._collectives)

    def wait(self, host: bool = False) -> Tensor:
        begin = self._ledger.clock.stamp()
        with self._ledger.span("await sums"):
            self._job.wait(host)
        self._ledger.record_wait(self._collectives, begin)
        return self._tensor


def partition(count: int, world: int) -> list[int]:
    """How many of `count` numbers each rank sums: equal partitions in rank order; the last ones may
    be smaller, or empty."""
    each = -(-count // world)
    return [min(each, max(0, count - rank * each)) for rank in range(world)]
