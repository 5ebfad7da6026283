"""`reference.positions.add_positions` in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.kernels.native.bindings import address, require_native


def add_positions(
    x: Tensor,  # [tokens, width] float32
    position: Tensor,  # [positions, width] float32
    lengths: Tensor,  # [samples] int64, candidates included
    candidate_counts: Tensor | None,  # [samples] int64
    keys: Tensor | None,  # [samples] int64
) -> tuple[Tensor, Tensor | None]:
    """As the reference."""
    token_keys = None if keys is None else keys.new_empty(x.shape[0])
    counts = None if candidate_counts is None else candidate_counts.contiguous()
    own = None if keys is None else keys.contiguous()
    inputs = lengths.contiguous(), counts, own, token_keys
    out: Tensor = _AddPositions.apply(x, position, *inputs)  # type: ignore[no-untyped-call]
    return out, token_keys


class _AddPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, position, lengths, counts, keys, token_keys):  # type: ignore[no-untyped-def]
        x = x.contiguous()
        out, places = torch.empty_like(x), lengths.new_empty(x.shape[0])
        require_native().add_positions(
            lengths.numel(), x.shape[1], address(lengths), address(counts), address(x),
            address(position), address(keys), address(out), address(token_keys), address(places),
        )  # fmt: skip
        ctx.save_for_backward(places)
        ctx.positions = position.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (places,) = ctx.saved_tensors
        grad = grad.contiguous()
        into = grad.new_zeros(ctx.positions)
        require_native().sum_positions(*grad.shape, address(places), address(grad), address(into))
        return grad, into, None, None, None, None
