"""The protocol that the exchange, the pipeline and the tests use, whatever carries the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from freescale.ledger.ledger import Ledger, ThreadLedger


class TransportError(RuntimeError):
    """A collective failed: a peer died, the network broke or the time ran out."""


class Handle(Protocol):
    """A collective under way."""

    path: str  # what carries it
    bytes: int  # that leave this rank

    def wait(self, host: bool = False) -> Tensor:
        """The result, for what the current stream does next. The host waits as long as it has a
        part in it; with `host`, until the bytes are there."""


class Transport(Protocol):
    """All ranks call the same methods in the same order. `kind` is one of the ledger's kinds of
    traffic."""

    rank: int
    world: int
    device: torch.device
    ledger: Ledger | ThreadLedger
    lines: int  # messages that it can carry beside each other
    about: str  # its name, and why it was chosen

    def all_to_all(
        self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], kind: str
    ) -> Handle:
        """Rows of tensor [sum(send), ...] to the ranks, in rank order -> [sum(receive), ...], in
        rank order."""

    def all_gather(self, tensor: Tensor, kind: str) -> Handle:
        """tensor [...] of one shape on every rank -> [world, ...]."""

    def all_reduce(self, tensor: Tensor, kind: str) -> Handle:
        """The sum over ranks, in place."""

    def broadcast(self, tensor: Tensor, kind: str) -> Handle:
        """Rank 0's, in place; tensor of one shape on every rank."""

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, of any length, in rank order. Blocking; for control, not for the
        step."""

    def channel(self, ledger: ThreadLedger, urgent: bool = False) -> Transport:
        """Another transport over the same ranks, for another thread: its traffic neither waits for
        this one's nor holds it up, and what is urgent goes ahead of the rest where the transport
        can. For AllToAll, AllGather and control messages: what is summed by torch's groups is the
        main thread's. One that was released is handed out again. A collective."""

    def release(self, channel: Transport) -> None:
        """Gives a channel back, which nobody uses any more: the thread that did has ended. Once all
        ranks have released it, the next `channel` of that urgency gets it. One that failed, or has
        something under way, is closed instead."""

    def clock_offsets(self) -> tuple[list[int], list[int]]:
        """Each rank's clock offset to rank 0 and its uncertainty, in nanoseconds."""

    def close(self) -> None: ...
