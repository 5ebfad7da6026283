"""Dense gradients in a few flat buffers, so that few large AllReduces carry them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from freescale.transport.api import Transport

BUCKET_BYTES = 25 << 20


class GradientBuckets:
    """Every parameter's .grad is a view of a bucket: nothing is copied before or after the AllReduce.

    Parameters that a rank's batch did not reach count as zero, so that all ranks reduce the same buffers. One further bucket
    carries the step's summed losses along.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._views: list[Tensor] = []
        self.flat: list[Tensor] = []
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        views: dict[int, Tensor] = {}
        for dtype, members in by_dtype.items():
            for bucket in _cut(members):
                flat = torch.zeros(sum(p.numel() for p in bucket), dtype=dtype, device=device)
                self.flat.append(flat)
                pieces = flat.split([p.numel() for p in bucket])
                views |= {id(p): piece.view_as(p) for p, piece in zip(bucket, pieces, strict=True)}
        self._views = [views[id(p)] for p in self.parameters]

    def clear(self) -> None:
        """Zero gradients, attached: before the first backward of a step."""
        for flat in self.flat:
            flat.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def reduce(self, transport: Transport, losses: Tensor) -> Tensor:
        """Sums gradients and losses [tasks] over the ranks, in place; returns the summed losses."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            assert parameter.grad is view, "an optimizer or the model replaced a gradient during the step"
        handles = [transport.all_reduce(flat, "dense") for flat in self.flat]
        summed = transport.all_reduce(losses, "dense")
        for handle in handles:
            handle.wait()
        return summed.wait()

    def clip(self, limit: float) -> Tensor:
        """Scales all gradients to a global norm of at most `limit`; returns the norm before. Nothing is read by the host."""
        norm = torch.stack([flat.double().square().sum() for flat in self.flat]).sum().sqrt()
        factor = (limit / norm.clamp(min=1e-30)).clamp(max=1.0)
        for flat in self.flat:
            flat.mul_(factor.to(flat.dtype))
        return norm


def _cut(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    size = BUCKET_BYTES + 1
    for parameter in parameters:
        length = parameter.numel() * parameter.element_size()
        if size + length > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += length
    return buckets
