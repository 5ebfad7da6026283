"""Which of two twins runs: the Triton kernel where it can, the plain-torch reference elsewhere. Decided once per batch."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from freescale.kernels import attention, triton_attention
from freescale.kernels.attention import AttentionPlan
from freescale.kernels.triton_attention import TilePlan


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def plan_attention(
    lengths: Tensor, heads: int, *, widths: tuple[int, int], dtype: torch.dtype, buckets: int = 0, **options: Any
) -> AttentionPlan | TilePlan:
    """The plan of the kernel that fits: head widths (d_qk, d_v) and the dtype that q, k and v will have."""
    fits = all(width in triton_attention.WIDTHS for width in widths) and dtype in triton_attention.DTYPES
    fits = fits and buckets <= triton_attention.MAX_BUCKETS and has_triton()
    kernel = triton_attention if lengths.is_cuda and fits else attention
    return kernel.plan_attention(lengths, heads, buckets=buckets, **options)


def hstu_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, plan: AttentionPlan | TilePlan, **options: Any) -> Tensor:
    """As `attention.hstu_attention`, by the kernel that the plan is for."""
    if isinstance(plan, TilePlan):
        return triton_attention.hstu_attention(q, k, v, lengths, plan=plan, **options)
    return attention.hstu_attention(q, k, v, lengths, plan=plan, **options)
