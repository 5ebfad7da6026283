"""The operations around the attention, by the batch's attention plan; the sampled softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from freescale.kernels.attention.checks import Plan
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.dispatch.versions import runs_triton
from freescale.kernels.layer import native, reference, triton, triton_fused, triton_positions
from freescale.kernels.layer.parameters import LayerOptions, LayerParameters
from freescale.kernels.softmax import native as native_softmax
from freescale.kernels.softmax import reference as softmax
from freescale.kernels.softmax import triton as triton_softmax
from freescale.kernels.softmax.reference import Negatives


def add_positions(
    plan: Plan, x: Tensor, position: Tensor, keys: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`layer.reference.add_positions`, in the version that fits `plan` and x."""
    if (
        isinstance(plan, TilePlan)
        and plan.tokens
        and _fits_triton(plan, x)
        and position.dtype in triton.DTYPES
    ):
        return triton_positions.add_positions(x, position, plan, keys, **options)
    fits = native.fits(plan, x, position.dtype)
    compute = native.add_positions if fits else reference.add_positions
    return compute(x, position, plan.lengths, plan.candidate_counts, keys, **options)


def layer_norm(plan: Plan, x: Tensor, *parameters: Any) -> Tensor:
    """`layer.reference.layer_norm`, in the version that fits `plan` and x."""
    compute = triton.layer_norm if _fits_triton(plan, x) else reference.layer_norm
    return compute(x, *parameters)


def norm_rows(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`layer.reference.layer_norm` in the dtype of x, in Triton on a GPU."""
    compute = triton.layer_norm if _fits_rows(x) else reference.layer_norm
    return compute(x, weight, bias, eps, x.dtype)


def swish_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`layer.reference.swish_norm` in the dtype of x, in Triton on a GPU."""
    compute = triton.swish_norm if _fits_rows(x) else reference.swish_norm
    return compute(x, weight, bias, eps, x.dtype)


def add_encodings(x: Tensor, position: Tensor, *rows: Any, **options: Any) -> Tensor:
    """`layer.reference.add_encodings`, in Triton on a GPU."""
    fits = _fits_rows(x) and position.dtype in triton.DTYPES
    compute = triton_positions.add_encodings if fits else reference.add_encodings
    return compute(x, position, *rows, **options)


def _fits_rows(x: Tensor) -> bool:
    return runs_triton(x.device) and x.dtype in triton.DTYPES and x.shape[1] <= triton.MAX_WIDTH


def silu_split(plan: Plan, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """`layer.reference.silu_split`, in the version that fits `plan` and x."""
    compute = triton.silu_split if _fits_triton(plan, x, widest=None) else reference.silu_split
    return compute(x, sizes)


def gated_norm(plan: Plan, x: Tensor, gate: Tensor, *parameters: Any, **options: Any) -> Tensor:
    """`layer.reference.gated_norm`, in the version that fits `plan` and x."""
    compute = triton.gated_norm if _fits_triton(plan, x) else reference.gated_norm
    return compute(x, gate, *parameters, **options)


def drop(plan: Plan, x: Tensor, *options: Any, relu: bool = False) -> Tensor:
    """`layer.reference.drop`, in the version that fits `plan` and x."""
    compute = triton.drop if _fits_triton(plan, x) else reference.drop
    return compute(x, *options, relu=relu)


def fits_fused_layer(
    plan: Plan, x: Tensor, gate_width: int, dtype: torch.dtype, wide: bool = False
) -> bool:
    """Whether whole layers of this batch, x [tokens, width], can run fused, in Triton or C.
    `dtype`: of the products. `wide` layers run in plain torch on a CPU."""
    fits = _fits_triton(plan, x) and gate_width <= triton.MAX_WIDTH
    return (plan.tokens > 0 and fits) or (not wide and native.fits(plan, x, dtype))


def run_layers(x: Tensor, layers: Sequence[LayerParameters], **options: Any) -> Tensor:
    """Runs one `models.HSTULayer` after another, as fused kernels."""
    chosen = LayerOptions(**options)
    compute = triton_fused.run_layers if isinstance(chosen.plan, TilePlan) else native.run_layers
    return compute(x, layers, chosen)


def _fits_triton(plan: Plan, x: Tensor, widest: int | None = triton.MAX_WIDTH) -> bool:
    """Whether x [tokens, width] of this plan can go through kernels for rows up to `widest`."""
    narrow = widest is None or x.shape[1] <= widest
    return isinstance(plan, TilePlan) and x.dtype in triton.DTYPES and narrow


def sampled_softmax(
    outputs: Tensor, rows: Tensor, targets: Tensor, negatives: Negatives, lengths: Tensor,
    **options: Any,
) -> Tensor:  # fmt: skip
    """`softmax.reference.sampled_softmax`. On a GPU in Triton, with products in autocast's dtype.
    On a CPU in C for small batches that share their negatives, and for negatives of each token."""
    inputs = (outputs, rows, targets, negatives, lengths)
    if (
        runs_triton(outputs.device)
        and {outputs.dtype, rows.dtype} <= set(triton_softmax.DTYPES)
        and outputs.shape[1] <= triton_softmax.MAX_WIDTH
    ):
        kind = outputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return triton_softmax.sampled_softmax(*inputs, dtype=dtype, **options)
    compute = (
        native_softmax.sampled_softmax
        if native_softmax.fits(outputs, rows, negatives)
        else softmax.sampled_softmax
    )
    return compute(*inputs, **options)
