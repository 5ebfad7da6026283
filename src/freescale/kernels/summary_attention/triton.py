"""SiLU attention to summaries as Triton kernels, for NVIDIA GPUs.

The same function as `summary_attention.reference`. Only rows that see a summary and summaries have
programs. Sums have a fixed order: the same inputs give the same bits, including gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.attention.triton import (
    DTYPES,
    WIDTHS,
    build_descriptor,
    choose_constants,
    cut_heads,
    find_kernel_width,
    make_readable,
    pad_heads,
)
from freescale.kernels.attention.triton_launch import AttentionLaunch
from freescale.kernels.jit.launch import launch_kernel, require_gpu, use_device
from freescale.kernels.summary_attention.plan import SummaryPlan
from freescale.kernels.summary_attention.reference import check_summary_inputs
from freescale.kernels.upload import upload

# Summaries are few: short tiles of them. Not tuned.
LAUNCH, FLOAT32_LAUNCH = AttentionLaunch(64, 32, 4, 2), AttentionLaunch(64, 32, 4, 1)


def summary_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: SummaryPlan, *, scale_length: float, alpha: float
) -> Tensor:
    """As the reference, with scores, SiLU and sums in float32."""
    check_summary_inputs(q, k, v, plan, scale_length)
    if q.dtype not in DTYPES or any(find_kernel_width(x.shape[2], x.dtype) is None for x in (q, v)):
        raise ValueError(
            f"the kernels are for {DTYPES} and heads up to {WIDTHS[-1]} wide, not {q.dtype}, "
            f"{q.shape[2]} and {v.shape[2]}; use kernels.summary_attention.reference"
        )
    require_gpu(q.device, "kernels.summary_attention.reference")
    padded = (pad_heads(x) for x in (q, k, v))
    out: Tensor = _SummaryAttention.apply(  # type: ignore[no-untyped-call]
        *padded, plan, float(alpha), float(scale_length)
    )
    return cut_heads(out, v.shape[2])


class _Call:
    """The launches of one attention and their common arguments."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SummaryPlan, alpha: float, scale: float
    ) -> None:
        self.plan, self.launch = plan, FLOAT32_LAUNCH if q.dtype == torch.float32 else LAUNCH
        self.q, self.k, self.v = q, k, v
        self.half_alpha, self.scale = alpha / 2, scale
        self.constants = choose_constants(q, v) | {
            "M": self.launch.tile,
            "N": self.launch.inner,
            "PERIOD": plan.segments.period,
            "TOKENS": plan.segments.tokens,
            "STAGES": self.launch.stages,
            "num_warps": self.launch.warps,
        }

    def forward(self, out: Tensor) -> None:
        from freescale.kernels.summary_attention.triton_kernels import forward_kernel

        self._launch(forward_kernel, "rows", self._describe(), out, inverse_scale=1 / self.scale)

    def backward(self, grad: Tensor, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
        from freescale.kernels.summary_attention.triton_kernels import (
            backward_kv_kernel,
            backward_q_kernel,
        )

        described = [*self._describe(), build_descriptor(grad, self.launch.tile)]
        factor, inverse = self.half_alpha / self.scale, 1 / self.scale
        self._launch(
            backward_kv_kernel, "summaries", described, grad_k, grad_v, factor=factor,
            inverse_scale=inverse,
        )  # fmt: skip
        self._launch(backward_q_kernel, "rows", described, grad_q, factor=factor)

    def _describe(self) -> list[Any]:
        sizes = (self.launch.tile, self.launch.inner, self.launch.inner)
        return [
            build_descriptor(x, size)
            for x, size in zip((self.q, self.k, self.v), sizes, strict=True)
        ]

    def _launch(
        self, kernel: Any, of: str, described: list[Any], *results: Tensor, **scalars: float
    ) -> None:
        size = self.launch.tile if of == "rows" else self.launch.inner
        kept = self.plan.kept
        if (of, size) not in kept:
            kept[of, size] = upload(plan_tiles(self.plan, of, size).astype(np.int32), self.q.device)
        table = kept[of, size]
        if len(table):
            launch_kernel(
                kernel, (len(table) * self.q.shape[1],), *described, *results, table,
                half_alpha=self.half_alpha, **scalars, **self.constants,
            )  # fmt: skip


class _SummaryAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, alpha, scale):  # type: ignore[no-untyped-def]
        q, k, v = make_readable(q), make_readable(k), make_readable(v)
        ctx.save_for_backward(q, k, v)
        ctx.plan, ctx.alpha, ctx.scale = plan, alpha, scale
        # zeros: rows of a first segment see nothing and have no program
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        if q.shape[0] and k.shape[0]:
            with use_device(q.device):
                _Call(q, k, v, plan, alpha, scale).forward(out)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v = ctx.saved_tensors
        grads = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        if q.shape[0] and k.shape[0]:
            with use_device(q.device):
                _Call(q, k, v, ctx.plan, ctx.alpha, ctx.scale).backward(make_readable(grad), *grads)
        return *grads, None, None, None


def plan_tiles(plan: SummaryPlan, of: str, size: int) -> np.ndarray:
    """Lists tiles of `size` rows that see a summary (`of` "rows") or of `size` summaries.

    Returns:
        [tiles, SummaryTileColumn] int64, the tile with the longest loop first.
    """
    start, first = plan.starts
    period, tokens = plan.segments.period, plan.segments.tokens
    if of == "rows":
        begin = np.where(plan.known > 0, 0, period)
        end = np.where(plan.counts > 0, plan.lengths, 0)
    else:
        begin = np.zeros_like(start)
        end = np.where(plan.lengths > 0, plan.counts, 0)
    per_sample = np.maximum(-(-(end - begin) // size), 0)
    sample = np.repeat(np.arange(len(start)), per_sample)
    number = np.arange(len(sample)) - (np.cumsum(per_sample) - per_sample)[sample]  # in its sample
    place = begin[sample] + number * size
    cost = place if of == "rows" else plan.lengths[sample] - place // tokens * period
    columns = (start, plan.lengths, first, plan.closed, plan.known)
    table = np.column_stack([*(column[sample] for column in columns), place])
    return table[np.argsort(-cost, kind="stable")]
