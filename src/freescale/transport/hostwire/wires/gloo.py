"""The wire over torch's gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from freescale.transport.hostwire.wires.api import probe_pieces


class _Work:
    def __init__(self, work: dist.Work | None, memory: Tensor) -> None:
        assert work is not None, "this rank is in the group"
        self._work, self._memory = work, memory

    def wait(self, seconds: float) -> Tensor:
        self._work.wait()  # the group's timeout is the transport's
        return self._memory

    def ready(self) -> bool:
        return self._work.is_completed()

    def free(self) -> None:
        pass


class GlooWire:
    """TCP, or ibverbs where torch's gloo has it. Pieces of a pair take several groups in turn: gloo
    moves a group's bytes by one thread."""

    path = "gloo"
    direct = True

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups
        world = dist.get_world_size(groups[0])
        self._sent, self._expected = [0] * world, [0] * world

    def send(self, peer: int, piece: Tensor) -> _Work:
        group = self._groups[self._sent[peer] % len(self._groups)]
        self._sent[peer] += 1
        return _Work(dist.isend(piece, group=group, group_dst=peer), piece)

    def expect(self, peer: int, size: int, into: Tensor | None) -> _Work:
        assert into is not None
        group = self._groups[self._expected[peer] % len(self._groups)]
        self._expected[peer] += 1
        return _Work(dist.irecv(into, group=group, group_src=peer), into)

    def probe(self, after: int | None, before: int | None, size: int, seconds: float) -> float:
        return probe_pieces(self, after, before, size, seconds)

    def close(self) -> None:
        pass

    def release(self) -> None:
        pass
