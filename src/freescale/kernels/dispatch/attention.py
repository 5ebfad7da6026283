"""Chooses the version of a batch's attention, together with its plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from freescale.kernels.attention import native_plan, reference, softmax, triton, triton_plan
from freescale.kernels.attention import plan as reference_plan
from freescale.kernels.attention.plan import AttentionPlan
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.dispatch.versions import has_triton, is_on_gpu


def plan_attention(
    lengths: Tensor,
    heads: int,
    *,
    widths: tuple[int, int],
    dtype: torch.dtype,
    buckets: int = 0,
    first: Sequence[int] | None = None,
    **options: Any,
) -> AttentionPlan | TilePlan:
    """Plans the attention for the fastest version that can run.

    Args:
        lengths: [samples] int64, candidates included.
        heads: Number of heads.
        widths: (d_qk, d_v) of a head.
        dtype: Of q, k and v.
        buckets: Of the time bias; 0 without one.
        first: [samples] the first query of each that counts. Outputs of earlier ones and gradients
            of these queries are arbitrary, gradients of these outputs must be 0. None: all count.
        options: The other arguments that all versions of `plan_attention` have.
    """
    if fits_triton_attention(is_on_gpu(lengths.device), has_triton(), widths, dtype, buckets):
        options |= {"buckets": buckets, "first": first}
        return _plan_tiles(lengths, heads, (widths, dtype), options)
    listed = native_plan.LISTED_SCORES if native_plan.is_available(lengths, dtype) else None
    if listed is not None and first is None:
        few = native_plan.plan_attention(lengths, heads, listed, buckets=buckets, **options)
        if few is not None:
            return few
    return reference_plan.plan_attention(
        lengths, heads, buckets=buckets, listed_scores=listed, first=first, **options
    )


def _plan_tiles(lengths: Tensor, heads: int, key: Any, options: dict[str, Any]) -> TilePlan:
    make = partial(triton_plan.plan_attention, lengths, heads, **options)
    host = options.get("host")
    if host is None or host.plans is None:
        return make()
    kept = heads, options.get("buckets"), key
    plan: TilePlan = host.plans.find(kept, make, options.get("timestamps"))
    return plan


def fits_triton_attention(
    gpu: bool, triton_there: bool, widths: tuple[int, ...], dtype: torch.dtype, buckets: int = 0
) -> bool:
    """Whether the Triton attention can run: `gpu` says whether the tensors are on a GPU,
    `triton_there` whether Triton is installed, and the others are as in `plan_attention`."""
    fits = dtype in triton.DTYPES and all(
        triton.find_kernel_width(width, dtype) is not None for width in widths
    )
    return gpu and triton_there and fits and buckets <= triton_plan.MAX_BUCKETS


def hstu_attention(*inputs: Tensor, plan: AttentionPlan | TilePlan, **options: Any) -> Tensor:
    """`reference.hstu_attention`, in the version that made `plan`."""
    if isinstance(plan, TilePlan):
        return triton.hstu_attention(*inputs, plan=plan, **options)
    return reference.hstu_attention(*inputs, plan=plan, **options)


def plan_softmax_attention(
    lengths: Tensor, heads: int, *, width: int, dtype: torch.dtype, **options: Any
) -> AttentionPlan | TilePlan:
    """As `plan_attention`, for heads of this width and a softmax."""
    if not fits_triton_attention(is_on_gpu(lengths.device), has_triton(), (width,), dtype):
        return softmax.plan_softmax_attention(lengths, heads, **options)
    return _plan_tiles(lengths, heads, (width, dtype), options)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan | TilePlan, **options: Any
) -> Tensor:
    """`softmax.softmax_attention`, in the version that made `plan`."""
    if isinstance(plan, TilePlan):
        return triton.softmax_attention(q, k, v, plan, **options)
    return softmax.softmax_attention(q, k, v, plan, **options)
