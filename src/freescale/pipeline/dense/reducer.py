"""What sums the dense gradients over the ranks (buckets.py), or keeps those of a single one
(local.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from freescale.transport.api import Transport


class Reducer(ABC):
    """Gradients are views of a few buffers, `flat`, when they are summed over the ranks and
    clipped."""

    parameters: list[nn.Parameter]
    flat: list[Tensor]
    _views: list[Tensor]  # of each parameter

    @property
    def order(self) -> list[int] | None:
        """Parameters by number, in the order in which they fill the buffers; None if sums do not
        depend on it, or it is not known yet."""
        return None

    def adopt_order(self, order: Sequence[int] | None) -> None:  # noqa: B027 - most have none
        """Between two steps: goes on with the order of an earlier run."""

    def watch_backward(self) -> AbstractContextManager[object]:
        """Around a run: the backward tells which gradients are there."""
        return nullcontext()

    def clear(self) -> None:
        """Before the first backward of a step: zero gradients, attached."""
        for flat in self.flat:
            flat.zero_()
        self._attach()

    @abstractmethod
    def start(self, transport: Transport, losses: Tensor, longest: int | None = None) -> None:
        """Before the last backward of a step, or after it: what is complete may leave. losses
        [tasks], to be summed too. `longest`: events of the longest sequence of the global batch, if
        it is known: of a parameter with a row per position no later row has a gradient."""

    @abstractmethod
    def send(self) -> None:
        """After the backward, before any other collective of the transport: what can leave has
        left, in one order everywhere."""

    @abstractmethod
    def reduce(self) -> Tensor:
        """Gradients become what all ranks apply, the same bits on each, and None where no rank has
        one; returns the losses summed over the ranks."""

    def clip(self, limit: float) -> Tensor:
        """Scales all gradients to a global norm of at most `limit`; returns the norm before.
        Nothing is read by the host."""
        sizes = [flat.abs() if flat.is_complex() else flat for flat in self.flat]
        norm = torch.stack([size.double().square().sum() for size in sizes]).sum().sqrt()
        factor = (limit / norm.clamp(min=1e-30)).clamp(max=1.0)
        for flat in self.flat:
            flat.mul_(factor.to(flat.dtype))
        return norm

    def _attach(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is not view:  # which is faster to see than to set
                parameter.grad = view

    def _collect(self) -> list[nn.Parameter]:
        """Copies the gradients that a backward has made into `flat`, with zeros for the others, and
        attaches them. Returns their parameters."""
        used: dict[nn.Parameter, Tensor] = {}
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                used[parameter] = view
        if used:
            found = [parameter.grad for parameter in used if parameter.grad is not None]
            gradients = [each.to_dense() if each.is_sparse else each for each in found]
            torch._foreach_copy_(list(used.values()), gradients)
        for parameter, view in used.items():
            parameter.grad = view
        return list(used)

    def _check_attached(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            assert parameter.grad is view, (
                "an optimizer or the model replaced a gradient during the step"
            )
