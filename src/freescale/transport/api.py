"""What the embedding exchange, the pipeline and the tests use, whatever carries the bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from freescale.ledger.ledger import Ledger, ThreadLedger


class TransportError(RuntimeError):
    """A collective failed: a peer died, the network broke or the time ran out."""


Gather = Callable[[bytes], list[bytes]]  # exchanges control messages: `Transport.gather_bytes`
Sizes = Sequence[int]  # rows for or from each rank


class Handle(Protocol):
    """A collective under way."""

    path: str  # name of the transport that carries it, in the ledger
    bytes: int  # bytes that leave this rank

    def wait(self, host: bool = False) -> Tensor:
        """Waits for the collective, once. What was sent may be overwritten afterwards. `host`: also
        block the host until the bytes are there; otherwise, on a GPU, the result is ready for what
        the stream does next. TransportError if a rank died, fell silent or disagrees on sizes."""


class Transport(Protocol):
    """Collectives between the ranks of a run.

    All ranks call the same methods in the same order. Methods that return a `Handle` start the
    collective; the tensor that they send must not change until it was waited for. `kind` is the
    kind of traffic that the ledger accounts the bytes under: counts, ids, rows, gradients, samples,
    attention or dense. All of them raise TransportError if the transport has failed before, or a
    rank died or fell silent.
    """

    rank: int  # number of this process, from 0
    world: int  # number of ranks
    device: torch.device  # device of the tensors
    ledger: Ledger | ThreadLedger  # records every collective
    lines: int  # messages that it can carry at the same time
    sums_apart: bool  # a channel's exchanges are a way around the process group, which sums
    machines: Sequence[int]  # the machine of each rank, from 0: they share memory there
    rdma: bool  # machines exchange by RDMA
    about: str  # its name, and why it was chosen

    def all_to_all(self, tensor: Tensor, send: Sizes, receive: Sizes, kind: str) -> Handle:
        """Sends rows to every rank and receives rows from every rank. tensor [sum(send), ...]:
        contiguous, in the order of the ranks that the rows go to. `send`, `receive`: [world]
        numbers of rows for and from each rank, this one included. Returns a handle on
        [sum(receive), ...], in the order of the ranks that they come from."""

    def all_gather(self, tensor: Tensor, kind: str) -> Handle:
        """Gathers tensor [...], alike on all ranks. A handle on [world, ...], in rank order."""

    def all_reduce(self, tensor: Tensor, kind: str) -> Handle:
        """Adds a tensor, alike on all ranks, up over them, in place. A handle on it."""

    def broadcast(self, tensor: Tensor, kind: str) -> Handle:
        """Overwrites a tensor, alike on every rank, by rank 0's. Returns a handle on it."""

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Exchanges control messages of any length. Blocks; not meant for every step. Returns
        [world], every rank's payload, in rank order."""

    def channel(self, ledger: ThreadLedger, urgent: bool = False) -> Transport:
        """Opens another transport over the same ranks, for another thread: one that all ranks have
        released is handed out again. A collective. TransportError if any rank has no memory or
        connections for it. It carries all_to_all, all_gather and gather_bytes, and does not wait
        for this transport's traffic; if it is `urgent` and the transport can, it overtakes that of
        other channels."""

    def release(self, channel: Transport) -> None:
        """Gives a channel back; the thread that used it has ended. The next call of `channel` with
        the same urgency returns it once all ranks have released it, unless it failed or has
        something under way. ValueError if it was released before, or is another transport's."""

    def clock_offsets(self) -> tuple[list[int], list[int]]:
        """Compares the clocks (`time.perf_counter_ns`) of the ranks. A collective. Returns, in ns,
        [world] what to add to a rank's clock to get rank 0's, and [world] how uncertain it is."""

    def close(self) -> None:
        """Closes connections, threads and channels. Peers that still wait for this rank fail."""


def is_nearby(transport: Transport) -> bool:
    """Whether all ranks are on one machine."""
    return len(set(transport.machines)) == 1


class Gathers(Protocol):
    @property
    def gather_bytes(self) -> Gather: ...


def gather_json(transport: Gathers, value: Any) -> list[Any]:
    """[world], every rank's value of plain JSON, in rank order. A collective."""
    return [json.loads(part) for part in transport.gather_bytes(json.dumps(value).encode())]
