"""Whole HSTU layers on a CPU, for batches whose attention is a list of pairs: what is between the
matrix products is one call of C each, forward and backward.

What `models.HSTULayer` computes from separate operations, as one autograd function a layer. The
same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from freescale.kernels.attention_checks import check_plan
from freescale.kernels.native.bindings import Shape, address, load_native, require_native
from freescale.kernels.reference.attention_plan import AttentionPlan
from freescale.kernels.triton.fused_layer import LayerOptions, LayerParameters
from freescale.random import compute_keep_threshold

# Scores (heads * pairs of tokens) up to which a list of pairs pays here: matrix products of padded
# groups compute a score in less time than C does.
LISTED_SCORES = 1 << 15


def is_there(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors where this one is, with products in `dtype`."""
    return dtype == torch.float32 and tensor.device.type == "cpu" and load_native() is not None


def fits(plan: object, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether x [tokens, width] of this plan, with products in `dtype`, can go through here."""
    listed = isinstance(plan, AttentionPlan) and plan.pairs is not None and plan.tokens > 0
    return listed and x.dtype == dtype and is_there(x, dtype)


def run_layers(x: Tensor, layers: Sequence[LayerParameters], options: LayerOptions) -> Tensor:
    """x [tokens, width], at least one token, through all layers. The number of a layer is the
    stream of its dropout."""
    plan = options.plan
    assert isinstance(plan, AttentionPlan)
    first = layers[0]
    check_plan(
        plan,
        x[:, None].expand(-1, options.heads, -1),
        plan.lengths,
        plan.candidate_counts,
        first.position_bias,
        first.time_bias,
    )
    for number, layer in enumerate(layers):
        inputs = x, *layer, options, number
        # dropout is a function of keys: there is no generator state to keep
        x = (
            checkpoint(_Layer.apply, *inputs, use_reentrant=False, preserve_rng_state=False)
            if options.recompute
            else _Layer.apply(*inputs)  # type: ignore[no-untyped-call]
        )
    return x


def _describe(x: Tensor, options: LayerOptions) -> Any:
    plan, keys = options.plan, options.keys
    assert isinstance(plan, AttentionPlan) and plan.pairs is not None
    pairs = plan.pairs
    return byref(
        Shape(
            *x.shape,
            options.heads,
            options.d_qk,
            options.d_v,
            pairs.query.numel(),
            *map(address, (pairs.query, pairs.key, pairs.distance, plan.bucket, keys)),
            0 if keys is None else compute_keep_threshold(options.keep),
            1 / options.keep,
            options.d_qk**-0.5,
            1 / options.scale_length,
            options.eps,
        )
    )


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *rest):  # type: ignore[no-untyped-def]
        *parameters, options, number = rest
        layer = LayerParameters._make(p if p is None else p.contiguous() for p in parameters)
        library, x = require_native(), x.contiguous()
        shape, (tokens, _) = _describe(x, options), x.shape
        normed, stats = torch.empty_like(x), x.new_empty(2, tokens, 2)
        library.norm_rows(
            shape, *map(address, (x, layer.input_weight, layer.input_bias, normed, stats[0]))
        )
        projected = torch.addmm(layer.projection_bias, normed, layer.projection.t())
        wide = options.heads * options.d_v
        attended, gated = x.new_empty(2, tokens, wide)
        activated, kept = torch.empty_like(projected), x.new_empty(wide)
        scores = x.new_empty(options.plan.pairs.query.numel(), options.heads)
        library.attend_and_gate(
            shape,
            number,
            *map(address, (projected, layer.position_bias, layer.time_bias, layer.gate_weight)),
            *map(address, (layer.gate_bias, activated, scores, attended, stats[1], kept, gated)),
        )
        ctx.save_for_backward(
            x, normed, stats, projected, activated, scores, attended, gated, *layer
        )
        ctx.options, ctx.number = options, number
        return torch.addmm(layer.output_bias, gated, layer.output.t()).add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, normed, stats, projected, activated, scores, attended, gated, *own = ctx.saved_tensors
        layer, options, library = LayerParameters(*own), ctx.options, require_native()
        shape, grad = _describe(x, options), grad.contiguous()
        of_gated = torch.mm(grad, layer.output)
        of_projected, of_attended = torch.empty_like(projected), torch.empty_like(attended)
        room = x.new_empty(2, gated.shape[1])
        grads = LayerParameters._make(None if p is None else torch.empty_like(p) for p in layer)
        for bias in (grads.position_bias, grads.time_bias):
            if bias is not None:
                bias.zero_()
        library.differentiate_attention(
            shape,
            ctx.number,
            *map(address, (of_gated, projected, activated, scores, attended, stats[1])),
            *map(address, (layer.gate_weight, layer.gate_bias, room)),
            *map(address, (of_attended, of_projected, grads.projection_bias, grads.gate_weight)),
            *map(address, (grads.gate_bias, grads.position_bias, grads.time_bias)),
        )
        torch.mm(grad.t(), gated, out=grads.output)
        library.sum_rows(*grad.shape, address(grad), address(grads.output_bias))
        torch.mm(of_projected.t(), normed, out=grads.projection)
        of_x, of_normed = grad.clone(), torch.mm(of_projected, layer.projection)
        library.differentiate_norm(
            shape,
            *map(address, (of_normed, x, stats[0])),
            *map(address, (layer.input_weight, of_x, grads.input_weight, grads.input_bias)),
        )
        return of_x, *grads, None, None
