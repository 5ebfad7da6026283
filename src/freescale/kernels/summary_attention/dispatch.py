"""Attention to summaries, in the version that fits the batch's attention plan."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from freescale.kernels.attention.checks import Plan
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.summary_attention import reference, triton


def attend_to_summaries(plan: Plan, *inputs: Any, **options: Any) -> Tensor:
    """`reference.summary_attention`, in the version that fits `plan`."""
    if isinstance(plan, TilePlan):
        return triton.summary_attention(*inputs, **options)
    return reference.summary_attention(*inputs, **options)
