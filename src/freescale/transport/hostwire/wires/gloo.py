"""Wires: pieces of host memory go from rank to rank, below hostwire. Over gloo here; shared memory
and UCX have their own files, and so have TCP streams, which only engine.c carries.

Between two ranks pieces arrive in the order in which they were sent, and both sides know their
sizes. A piece leaves when its receiver expects it: what is expected bounds what is on the way, and
what is urgent need not queue behind more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Sending(Protocol):
    def ready(self) -> bool:
        """`wait` returns at once. False where that is not known."""

    def wait(self, seconds: float) -> Tensor | None:
        """Until the memory that was sent may be written again. Raises RuntimeError or OSError if
        the peer is gone, or late."""


class Arriving(Protocol):
    def ready(self) -> bool:
        """`wait` returns at once. False where that is not known."""

    def wait(self, seconds: float) -> Tensor:
        """The bytes that came, in host memory. Raises as `Sending.wait` does."""

    def free(self) -> None:
        """They have been read."""


class Wire(Protocol):
    path: str  # what the ledger calls it
    # sends from, and receives into, any host memory; otherwise only from the channel's ring
    direct: bool

    def send(self, peer: int, piece: Tensor) -> Sending:
        """piece: bytes [n] of the channel's ring or, if `direct`, of any host memory."""

    def expect(self, peer: int, size: int, into: Tensor | None) -> Arriving:
        """The next piece of that peer; `into` [size] is given if `direct`."""

    def close(self) -> None:
        """Whoever waits for this rank hears of it."""


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

    def close(self) -> None:
        pass
