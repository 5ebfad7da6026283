"""The arguments of fused layers: each layer's parameters, and the options that all share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.attention.checks import Plan, check_plan, check_same_device
from freescale.kernels.attention.triton import find_kernel_width
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.upload import upload


class LayerParameters(NamedTuple):
    """Parameters of one layer, in the order of its autograd function's arguments."""

    input_weight: Tensor  # [width]
    input_bias: Tensor
    projection: Tensor  # [2 heads (d_qk + d_v), width]
    projection_bias: Tensor
    gate_weight: Tensor  # [heads d_v]
    gate_bias: Tensor
    output: Tensor  # [width, heads d_v], of a wide layer [width, 3 heads d_v]
    output_bias: Tensor | None  # [width]: added with the product, by the next layer
    position_bias: Tensor | None
    time_bias: Tensor | None


@dataclass(frozen=True)
class LayerOptions:
    """Options that all layers share in a step."""

    plan: Plan
    heads: int
    d_qk: int
    d_v: int
    scale_length: int
    eps: float
    dtype: torch.dtype  # of the products
    keys: Tensor | None  # [tokens] int64: random keys; None: no dropout
    keep: float  # share of the elements that is kept
    recompute: bool  # whether backward recomputes a layer's activations
    first: int = 0  # number of the first layer
    wide: bool = False  # SiLU of the gate alone, and `wide_gate` before the output

    @property
    def kernel_widths(self) -> tuple[int, int]:
        """Head widths of queries and values in the attention's kernels: at least d_qk and d_v."""
        found = [find_kernel_width(width, self.dtype) for width in (self.d_qk, self.d_v)]
        assert found[0] is not None and found[1] is not None
        return found[0], found[1]

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """Columns of the projection: gate, values, queries, keys, including each head's padding."""
        of_queries, of_values = self.kernel_widths
        return self.heads * self.d_v, self.heads * of_values, *(2 * (self.heads * of_queries,))

    def locate_rows(self, device: torch.device) -> Tensor | None:
        """[rows of the projection] int64: their places in the `columns`; None without padding."""
        widths = self.d_qk, self.d_v
        if self.kernel_widths == widths:
            return None
        return _locate_rows(self.heads, widths, self.kernel_widths, device)

    def check(self, x: Tensor, first: LayerParameters) -> None:
        """Checks the plan against x [tokens, width] and the biases of the first layer."""
        plan = self.plan
        check_plan(
            plan, len(x), self.heads, plan.lengths, plan.candidate_counts, first.position_bias,
            first.time_bias,
        )  # fmt: skip
        check_same_device(x=x, plan=plan.lengths)

    @property
    def attention(self) -> tuple[TilePlan, float, float]:
        """Plan, alpha and scale of the Triton attention."""
        assert isinstance(self.plan, TilePlan)
        return self.plan, self.d_qk**-0.5, float(self.scale_length)


@cache
def _locate_rows(
    heads: int, widths: tuple[int, int], padded: tuple[int, int], device: torch.device
) -> Tensor:
    (d_qk, d_v), (of_queries, of_values) = widths, padded
    pieces = [np.arange(heads * d_v)]
    start = heads * d_v
    for width, wide in ((d_v, of_values), (d_qk, of_queries), (d_qk, of_queries)):
        pieces.append((start + wide * np.arange(heads)[:, None] + np.arange(width)).ravel())
        start += heads * wide
    return upload(np.concatenate(pieces), device)
