"""SiLU attention from the rows of later segments to summaries of earlier ones, the reference in
plain torch.

    out_i = sum over visible summaries j of SiLU(alpha * q_i . k_j) * v_j / scale_length

A `SummaryPlan` determines who sees which; rows that see none get 0. There is no bias by position or
time: a summary carries its position. Only one group of blocks has scores at a time. Backward
recomputes them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freescale.batch import concat_ranges
from freescale.kernels.attention.checks import check_dtype_and_scale, check_same_device
from freescale.kernels.attention.plan import TILE_BUDGET
from freescale.kernels.attention.reference import split_heads, split_heads_transposed, write_heads
from freescale.kernels.groups import Group, plan_groups
from freescale.kernels.summary_attention.plan import SummaryPlan
from freescale.kernels.upload import upload


def summary_attention(
    q: Tensor,  # [rows, heads, d_qk]
    k: Tensor,  # [summaries, heads, d_qk]
    v: Tensor,  # [summaries, heads, d_v]
    plan: SummaryPlan,
    *,
    scale_length: float,
    alpha: float,
) -> Tensor:  # [rows, heads, d_v]
    """In the inputs' dtype (SiLU itself in at least float32)."""
    check_summary_inputs(q, k, v, plan, scale_length)
    out: Tensor = _SummaryAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, plan, float(alpha), float(scale_length)
    )
    return out


def check_summary_inputs(
    q: Tensor, k: Tensor, v: Tensor, plan: SummaryPlan, scale_length: float
) -> None:
    """Raises ValueError, with the values, for inputs that do not fit each other and the plan."""
    same = q.shape[1:] == k.shape[1:] and k.shape[:2] == v.shape[:2]
    if not q.ndim == k.ndim == v.ndim == 3 or not same:
        raise ValueError(
            "q [rows, heads, d_qk], k [summaries, heads, d_qk] and v [summaries, heads, d_v] do "
            f"not fit: {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    check_dtype_and_scale(q, k, v, scale_length)
    check_same_device(q=q, k=k, v=v)
    if (plan.rows, plan.summaries) != (q.shape[0], k.shape[0]):
        raise ValueError(
            f"the plan is for {plan.rows} rows and {plan.summaries} summaries, not {q.shape[0]} "
            f"and {k.shape[0]}; make a plan for these"
        )


def _group_blocks(plan: SummaryPlan, heads: int, device: torch.device) -> list[tuple[Group, Group]]:
    """Groups blocks that are computed together: their rows and their summaries. Summaries that pad
    a block are zero and add nothing."""
    groups: list[tuple[Group, Group]] | None = plan.kept.get("groups")
    if groups is None:
        table = plan.find_blocks()
        cost = lambda seen: heads * plan.segments.period * seen  # noqa: E731
        indices = plan_groups(table[:, 3], cost, TILE_BUDGET)
        groups = [
            (_group(row, rows, plan.rows, device), _group(summary, seen, plan.summaries, device))
            for row, rows, summary, seen in (table[i].T for i in indices)
        ]
        plan.kept["groups"] = groups
    return groups


def _group(starts: np.ndarray, lengths: np.ndarray, total: int, device: torch.device) -> Group:
    """Makes a group of these blocks of the `total` rows or summaries."""
    samples, longest = np.arange(len(lengths)), int(lengths.max())
    regular = (starts == samples * longest).all() and lengths.min() == longest
    if regular and longest * len(lengths) == total:
        return Group.all(len(lengths), longest, device)
    tokens, slots = (
        concat_ranges(torch.from_numpy(first), torch.from_numpy(lengths)).numpy()
        for first in (starts, samples * longest)
    )
    numbers, own, places = (upload(table, device) for table in (samples, tokens, slots))
    return Group(numbers, longest, own, places, lengths)


class _SummaryAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, alpha, scale):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, k, v)
        ctx.plan, ctx.alpha, ctx.scale = plan, alpha, scale
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        with torch.autocast(q.device.type, enabled=False):
            for rows, seen in _group_blocks(plan, q.shape[1], q.device):
                # [n * heads, rows, summaries]
                scores = torch.bmm(split_heads(rows, q) * alpha, split_heads_transposed(seen, k))
                weights = torch.nn.functional.silu(_widen(scores), inplace=True).to(v.dtype)
                write_heads(out, rows, torch.bmm(weights, split_heads(seen, v)).div_(scale))
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v = ctx.saved_tensors
        grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
        # wide sums: a summary is in many blocks
        grad_k, grad_v = (
            torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
            for x in (k, v)
        )
        with torch.autocast(q.device.type, enabled=False):
            for rows, seen in _group_blocks(ctx.plan, q.shape[1], q.device):
                q_g, grad_g = split_heads(rows, q) * ctx.alpha, split_heads(rows, grad) / ctx.scale
                k_g, v_t = split_heads(seen, k), split_heads_transposed(seen, v)
                scores = _widen(torch.bmm(q_g, split_heads_transposed(seen, k)))
                sigmoid = torch.sigmoid(scores)
                weights = scores.mul_(sigmoid)
                _accumulate(grad_v, seen, torch.bmm(weights.to(v.dtype).transpose(1, 2), grad_g))
                slope = weights.addcmul_(weights, sigmoid, value=-1).add_(sigmoid)
                change = slope.mul_(torch.bmm(grad_g, v_t)).to(q.dtype)
                write_heads(grad_q, rows, torch.bmm(change, k_g).mul_(ctx.alpha))
                _accumulate(grad_k, seen, torch.bmm(change.transpose(1, 2), q_g))
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _widen(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _accumulate(total: Tensor, group: Group, values: Tensor) -> None:
    """Adds [n * heads, length, d] to [summaries, heads, d]."""
    heads, width = total.shape[1:]
    rows = values.view(len(group), heads, group.length, width).transpose(1, 2)
    total.index_add_(0, group.tokens, group.unpad(rows).to(total.dtype))
