"""AllToAll over gloo, pair by pair: of tensors on the host, and of tensors on a GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.streams import record_event
from freescale.transport.api import Sizes


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
