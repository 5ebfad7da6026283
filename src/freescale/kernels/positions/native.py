"""`positions.reference.add_positions` in C, in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.kernels.native import address, require_native
from freescale.kernels.positions.reference import STREAM
from freescale.random import compute_keep_threshold


def add_positions(
    x: Tensor, position: Tensor, lengths: Tensor, candidate_counts: Tensor | None,
    keys: Tensor | None, *, scale: float = 1.0, keep: float = 1.0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As the reference."""
    token_keys = None if keys is None else keys.new_empty(x.shape[0])
    counts = None if candidate_counts is None else candidate_counts.contiguous()
    own = None if keys is None else keys.contiguous()
    inputs = lengths.contiguous(), counts, own, token_keys, scale, keep
    out: Tensor = _AddPositions.apply(x, position, *inputs)  # type: ignore[no-untyped-call]
    return out, token_keys


class _AddPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, position, lengths, counts, keys, token_keys, scale, keep):  # type: ignore[no-untyped-def]
        x, position = x.contiguous(), position.contiguous()
        out, places = torch.empty_like(x), lengths.new_empty(x.shape[0])
        kept = None if keys is None or keep == 1 else torch.empty_like(x)
        require_native().add_positions(
            lengths.numel(), x.shape[1], STREAM,
            *map(address, (lengths, counts, x, position, keys)), scale,
            compute_keep_threshold(keep), 1 / keep, *map(address, (out, token_keys, places, kept)),
        )  # fmt: skip
        ctx.save_for_backward(places, kept)
        ctx.positions, ctx.scale = position.shape, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        places, kept = ctx.saved_tensors
        grad = grad.contiguous()
        of_x, into = torch.empty_like(grad), grad.new_zeros(ctx.positions)
        require_native().differentiate_positions(
            *grad.shape, *map(address, (places, kept, grad)), ctx.scale, address(of_x),
            address(into),
        )  # fmt: skip
        return of_x, into, None, None, None, None, None, None
