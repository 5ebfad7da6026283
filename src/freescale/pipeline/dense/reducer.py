"""What sums the dense gradients over the ranks: exactly (buckets.py) or compressed
(freescale.compress)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from freescale.transport.api import Transport


class Reducer(Protocol):
    @property
    def flat(self) -> list[Tensor]:
        """All gradients, in buffers that the parameters' .grad are views of when they are
        clipped."""

    @property
    def order(self) -> list[int] | None:
        """Parameters by number, as their sums were divided; None where it does not matter, or is
        not known yet."""

    def adopt_order(self, order: Sequence[int] | None) -> None:
        """Between two steps: goes on with the order of an earlier run."""

    def watch_backward(self) -> AbstractContextManager[object]:
        """Around a run: the backward tells which gradients are there."""

    def clear(self) -> None:
        """Before the first backward of a step."""

    def start(self, transport: Transport, losses: Tensor, longest: int | None = None) -> None:
        """Before the last backward of a step, or after it: what is complete may leave. losses
        [tasks], to be summed too. `longest`: events of the longest sequence of the global batch, if
        it is known: of a parameter with a row per position no later row has a gradient."""

    def send(self) -> None:
        """After the backward, before any other collective of the transport: what can leave has
        left, in one order everywhere."""

    def reduce(self) -> Tensor:
        """Gradients become what all ranks apply, the same bits on each, and None where no rank has
        one; returns the losses summed over the ranks."""

    def clip(self, limit: float) -> Tensor:
        """Scales what is applied to a global norm of at most `limit`; returns the norm before."""


MakeReducer = Callable[[Iterable[nn.Parameter], torch.device], Reducer]
