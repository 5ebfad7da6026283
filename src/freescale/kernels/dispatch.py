"""Which of two twins runs: the Triton kernel where it can, the plain-torch reference elsewhere.

Decided once per batch, with its plan: what a layer does around the attention runs where the attention runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from freescale.kernels import attention, layer, triton_attention, triton_attention_plan, triton_layer
from freescale.kernels.attention import AttentionPlan
from freescale.kernels.triton_attention_plan import TilePlan


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def plan_attention(
    lengths: Tensor, heads: int, *, widths: tuple[int, int], dtype: torch.dtype, buckets: int = 0, **options: Any
) -> AttentionPlan | TilePlan:
    """The plan of the kernel that fits: head widths (d_qk, d_v) and the dtype that q, k and v will have."""
    fits = all(width in triton_attention.WIDTHS for width in widths) and dtype in triton_attention.DTYPES
    fits = fits and buckets <= triton_attention_plan.MAX_BUCKETS and has_triton()
    plan = triton_attention_plan.plan_attention if lengths.is_cuda and fits else attention.plan_attention
    return plan(lengths, heads, buckets=buckets, **options)


def hstu_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, plan: AttentionPlan | TilePlan, **options: Any) -> Tensor:
    """As `attention.hstu_attention`, by the kernel that the plan is for."""
    if isinstance(plan, TilePlan):
        return triton_attention.hstu_attention(q, k, v, lengths, plan=plan, **options)
    return attention.hstu_attention(q, k, v, lengths, plan=plan, **options)


def layer_norm(plan: AttentionPlan | TilePlan, x: Tensor, *parameters: Any) -> Tensor:
    """As `layer.layer_norm`."""
    return _layer(plan, x).layer_norm(x, *parameters)


def silu_split(plan: AttentionPlan | TilePlan, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """As `layer.silu_split`."""
    return _layer(plan, x, widest=None).silu_split(x, sizes)


def gated_norm(plan: AttentionPlan | TilePlan, x: Tensor, gate: Tensor, *parameters: Any, **options: Any) -> Tensor:
    """As `layer.gated_norm`."""
    return _layer(plan, x).gated_norm(x, gate, *parameters, **options)


def _layer(plan: AttentionPlan | TilePlan, x: Tensor, widest: int | None = triton_layer.MAX_WIDTH) -> Any:
    fits = x.dtype in triton_layer.DTYPES and (widest is None or x.shape[1] <= widest)
    return triton_layer if isinstance(plan, TilePlan) and fits else layer
