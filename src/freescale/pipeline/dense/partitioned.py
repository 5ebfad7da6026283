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

from freescale.ledger.ledger import Collective, Ledger
from freescale.pipeline.lane import Job, Lane
from freescale.transport.api import Handle, Transport


class PartitionedAllReduce:
    """Sums one after another, by a lane of its own: they go on while the main thread computes."""

    def __init__(self, transport: Transport) -> None:
        """Opens a channel: a collective."""
        assert isinstance(transport.ledger, Ledger)
        self.ledger, self.gather_bytes = transport.ledger, transport.gather_bytes
        # urgent: a rank that waits for a sum computes nothing
        self.lane = Lane("dense", transport, urgent=True)

    def all_reduce(self, tensor: Tensor, kind: str) -> Handle:
        """As `Transport.all_reduce`; tensor [n]."""
        return _Sum(self, tensor, kind)

    def rest(self) -> None:
        self.lane.rest()

    def close(self) -> None:
        self.lane.close()


class _Sum:
    def __init__(self, summing: PartitionedAllReduce, tensor: Tensor, kind: str) -> None:
        self._summing, self._tensor, self._kind = summing, tensor, kind
        self._collectives: list[Collective] = []
        self.path, self.bytes = "", 0  # known once it has travelled
        self._job: Job = summing.lane.submit(self._run, [tensor])

    def _run(self) -> None:
        lane, tensor = self._summing.lane, self._tensor
        if lane.transport.world == 2:
            torch.add(*lane.transport.all_gather(tensor, self._kind).wait(), out=tensor)
        else:
            self._sum_partitions()
        self._collectives = lane.side.take()
        self.path = self._collectives[0].path
        self.bytes = sum(collective.sent for collective in self._collectives)

    def _sum_partitions(self) -> None:
        lane, tensor = self._summing.lane, self._tensor
        rank, world = lane.transport.rank, lane.transport.world
        sizes = partition(tensor.numel(), world)
        mine = [sizes[rank]] * world
        came = lane.transport.all_to_all(tensor, sizes, mine, self._kind).wait()
        first, *others = torch.split(came, mine)
        total = first.clone()
        for part in others:
            total += part
        tensor.copy_(lane.transport.all_to_all(total.repeat(world), mine, sizes, self._kind).wait())

    def wait(self, host: bool = False) -> Tensor:
        begin = self._summing.ledger.clock.stamp()
        with self._summing.ledger.span("await sums"):
            self._job.wait(host)
        self._summing.ledger.record_wait(self._collectives, begin)
        return self._tensor


def partition(count: int, world: int) -> list[int]:
    """How many of `count` numbers each rank sums: equal partitions in rank order; the last ones may
    be smaller, or empty."""
    each = -(-count // world)
    return [min(each, max(0, count - rank * each)) for rank in range(world)]
