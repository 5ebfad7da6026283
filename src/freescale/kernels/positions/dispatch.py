"""The inputs of the encoder, in the version that fits the batch's attention plan."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from freescale.kernels.attention.checks import Plan
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.layer.dispatch import fits_triton
from freescale.kernels.layer.native import fits as fits_native
from freescale.kernels.layer.triton import DTYPES
from freescale.kernels.positions import native, reference, triton


def add_positions(
    plan: Plan, x: Tensor, position: Tensor, keys: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`reference.add_positions`, in the version that fits `plan` and x."""
    if (
        isinstance(plan, TilePlan)
        and plan.tokens
        and fits_triton(plan, x)
        and position.dtype in DTYPES
    ):
        return triton.add_positions(x, position, plan, keys, **options)
    compute = (
        native.add_positions if fits_native(plan, x, position.dtype) else reference.add_positions
    )
    return compute(x, position, plan.lengths, plan.candidate_counts, keys, **options)
