"""The protocol of hostwire's channels: transfers in one order, the same on every rank, driven in C
(engine.py) or in Python (python_channel.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class ChannelTransfer(Protocol):
    """A transfer under way. `arrived` is an event after which all of the result is in place; None
    if it is when `wait` returns."""

    arrived: torch.cuda.Event | None

    def wait(self) -> None:
        """Waits; what the current stream does next has the result. Raises TransportError."""


class Channel(Protocol):
    """`urgent` transfers overtake bulk of the same rank. Both methods raise TransportError if the
    channel has failed before."""

    def all_to_all(
        self,
        kind: str,
        urgent: bool,
        tensor: Tensor,
        send: Sequence[int],
        output: Tensor,
        receive: Sequence[int],
    ) -> ChannelTransfer:
        """Sends the rows of tensor [sum(send), ...] to the ranks and receives
        output [sum(receive), ...], this rank's rows included; both in rank order."""

    def all_gather(
        self, kind: str, urgent: bool, tensor: Tensor, output: Tensor
    ) -> ChannelTransfer:
        """Sends tensor [...] to all ranks and receives output [world, ...], this rank's
        included."""

    def close(self) -> bool:
        """Whether no thread uses its wires and memory any more. The wires stay open."""
