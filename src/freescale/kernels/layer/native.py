"""All HSTU layers on a CPU in C, for batches whose attention is a list of pairs.

One autograd function for the whole stack of `models.HSTULayer`, with one call forward and one
backward. The same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int64
from typing import cast

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from freescale.kernels.attention.native_plan import is_available
from freescale.kernels.attention.plan import AttentionPlan
from freescale.kernels.layer.parameters import LayerOptions, LayerParameters
from freescale.kernels.layer.reference import STREAM
from freescale.kernels.native import Shape, address, list_addresses, require_native
from freescale.random import compute_keep_threshold

_EACH = len(LayerParameters._fields)


def fits(plan: object, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether x [tokens, width] of this plan, with products in `dtype`, can run in C."""
    listed = isinstance(plan, AttentionPlan) and plan.pairs is not None and plan.tokens > 0
    return listed and x.dtype == dtype and is_available(x, dtype)


def run_layers(x: Tensor, layers: Sequence[LayerParameters], options: LayerOptions) -> Tensor:
    """Runs x [tokens, width], at least one token, through all layers. The number of a layer is the
    stream of its dropout."""
    options.check(x, layers[0])
    inputs = x, options, *(parameter for layer in layers for parameter in layer)
    # dropout is a function of random keys: no generator state to preserve
    out: Tensor = (
        checkpoint(_Layers.apply, *inputs, use_reentrant=False, preserve_rng_state=False)
        if options.recompute
        else _Layers.apply(*inputs)  # type: ignore[no-untyped-call]
    )
    return out


def _describe(x: Tensor, options: LayerOptions, first: LayerParameters) -> Shape:
    plan, keys = options.plan, options.keys
    assert isinstance(plan, AttentionPlan) and plan.pairs is not None
    pairs = plan.pairs
    return Shape(
        *x.shape, options.heads, options.d_qk, options.d_v, pairs.query.numel(),
        *(0 if bias is None else bias.numel() for bias in (first.position_bias, first.time_bias)),
        *map(address, (pairs.query, pairs.key, pairs.distance, plan.bucket, keys)),
        0 if keys is None else compute_keep_threshold(options.keep), 1 / options.keep,
        options.d_qk**-0.5, 1 / options.scale_length, options.eps,
    )  # fmt: skip


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, options, *parameters):  # type: ignore[no-untyped-def]
        x, library = x.contiguous(), require_native()
        own = [p if p is None else p.contiguous() for p in parameters]
        shape = _describe(x, options, LayerParameters._make(own[:_EACH]))
        count, sizes = len(own) // _EACH, (c_int64(), c_int64())
        library.count_room(shape, count, *map(byref, sizes))
        kept, out = x.new_empty(sizes[0].value), torch.empty_like(x)
        library.run_layers(
            shape, count, list_addresses(own), address(x), address(kept), address(out)
        )
        ctx.save_for_backward(x, kept, *own)
        # `shape` points to the plan and the keys, which the options keep alive
        ctx.options, ctx.shape, ctx.room = options, shape, sizes[1].value
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, kept, *own = ctx.saved_tensors
        of_x, grads = grad.clone(memory_format=torch.contiguous_format), _allocate_like(own)
        room = x.new_empty(ctx.room)
        require_native().differentiate_layers(
            ctx.shape, len(own) // _EACH, list_addresses(own), *map(address, (x, kept, room, of_x)),
            list_addresses(grads),
        )  # fmt: skip
        return of_x, None, *grads


def _allocate_like(parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Allocates their gradients in one piece. Biases come last: their sizes may be odd, and the
    matrices still begin at a cache line."""
    biases = _EACH - 2
    order = sorted(
        (n for n, p in enumerate(parameters) if p is not None), key=lambda n: n % _EACH >= biases
    )
    own = [cast(Tensor, parameters[number]) for number in order]
    flat = own[0].new_empty(sum(parameter.numel() for parameter in own))
    views = _unflatten_dense_tensors(flat, own)  # type: ignore[no-untyped-call]
    pieces = dict(zip(order, views, strict=True))
    return [pieces.get(number) for number in range(len(parameters))]


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
