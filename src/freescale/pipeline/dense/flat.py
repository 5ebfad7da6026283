"""Gradients of many parameters in a few flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


class FlatGradients:
    """Every parameter's .grad is a view of one of `flat`: nothing is copied before or after they
    are summed over the ranks."""

    parameters: list[nn.Parameter]
    flat: list[Tensor]
    _views: list[Tensor]  # of each parameter

    @property
    def order(self) -> list[int] | None:
        """In which parameters were divided, where sums depend on it."""
        return None

    def adopt_order(self, order: Sequence[int] | None) -> None:
        """That of an earlier run."""

    def watching(self) -> AbstractContextManager[object]:
        """While a schedule runs."""
        return nullcontext()

    def clear(self) -> None:
        """Zero gradients, attached: before the first backward of a step."""
        for flat in self.flat:
            flat.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def clip(self, limit: float) -> Tensor:
        """Scales all gradients to a global norm of at most `limit`; returns the norm before.
        Nothing is read by the host."""
        sizes = [flat.abs() if flat.is_complex() else flat for flat in self.flat]
        norm = torch.stack([size.double().square().sum() for size in sizes]).sum().sqrt()
        factor = (limit / norm.clamp(min=1e-30)).clamp(max=1.0)
        for flat in self.flat:
            flat.mul_(factor.to(flat.dtype))
        return norm

    def _check_attached(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            assert parameter.grad is view, (
                "an optimizer or the model replaced a gradient during the step"
            )
