"""Jagged SiLU attention of HSTU (arXiv 2402.17152), the reference in plain torch.

    out_i = sum over j that i may see of SiLU(alpha * q_i . k_j + bias_ij) * v_j / scale_length

A token sees itself and what is before it in its sample. The last `candidate_counts[s]` tokens of
sample s are candidates: they see the history and themselves, not each other. The divisor is fixed,
never a length of the batch.

Scores exist one tile at a time, in forward and in backward, which computes them again: memory grows
with the tokens, not with the square of the lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.attention.checks import check_inputs, check_plan
from freescale.kernels.attention.pairs import PairsAttention
from freescale.kernels.attention.plan import AttentionPlan, Relation, plan_attention
from freescale.kernels.groups import Group


def hstu_attention(
    q: Tensor,  # [tokens, heads, d_qk]
    k: Tensor,  # [tokens, heads, d_qk]
    v: Tensor,  # [tokens, heads, d_v]
    lengths: Tensor,  # [samples] int64, candidates included
    *,
    scale_length: int,
    alpha: float,
    candidate_counts: Tensor | None = None,  # [samples] int64
    # [N], by the distance of two positions; N above the longest distance
    position_bias: Tensor | None = None,
    # [buckets + 1], by the logarithm of the time between two tokens
    time_bias: Tensor | None = None,
    timestamps: Tensor | None = None,  # [tokens] int64
    # of the same lengths, candidates and timestamps: saves making it per layer
    plan: AttentionPlan | None = None,
) -> Tensor:  # [tokens, heads, d_v]
    """SiLU attention over jagged samples, in the inputs' dtype (SiLU itself in at least
    float32)."""
    check_inputs(q, k, v, lengths, position_bias, time_bias, timestamps, scale_length)
    if plan is None:
        plan = plan_attention(
            lengths,
            q.shape[1],
            candidate_counts=candidate_counts,
            timestamps=None if time_bias is None else timestamps,
            buckets=0 if time_bias is None else time_bias.numel() - 1,
            distances=position_bias is not None,
        )
    check_plan(plan, q, lengths, candidate_counts, position_bias, time_bias)
    out: Tensor
    if plan.pairs is not None:
        out = PairsAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, position_bias, time_bias, plan.pairs, plan.bucket, alpha, scale_length
        )
        return out
    out = _Attention.apply(  # type: ignore[no-untyped-call]
        q, k, v, position_bias, time_bias, plan, float(alpha), float(scale_length)
    )
    return out


def split_heads(group: Group, values: Tensor) -> Tensor:
    """[tokens, heads, d] -> [n * heads, length, d]."""
    return group.pad(values).transpose(1, 2).reshape(-1, group.length, values.shape[2]).contiguous()


def split_heads_transposed(group: Group, values: Tensor) -> Tensor:
    """[tokens, heads, d] -> [n * heads, d, length], laid out so (of a single sample, reshape would
    give a view): products with a transposed right side are several times slower on some
    processors."""
    return (
        group.pad(values)
        .permute(0, 2, 3, 1)
        .reshape(-1, values.shape[2], group.length)
        .contiguous()
    )


def write_heads(target: Tensor, group: Group, values: Tensor) -> None:
    """[n * heads, length, d] into [tokens, heads, d]."""
    heads, width = target.shape[1:]
    rows = values.view(len(group), heads, group.length, width).transpose(1, 2)
    group.put(target, rows)


def _compute_scores(
    q: Tensor, k_t: Tensor, tile: Relation, count: int, biases: tuple[Tensor | None, Tensor | None]
) -> Tensor:
    """[n * heads, queries, keys] in at least float32. q is scaled."""
    scores = torch.bmm(q[:, tile.start : tile.stop], k_t[:, :, : tile.stop])
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    for bias, index in zip(biases, (tile.distance, tile.bucket), strict=True):
        if bias is not None:
            assert index is not None
            pairs = (
                bias.to(scores.dtype)
                .index_select(0, index.flatten())
                .view(-1, 1, *scores.shape[1:])
            )
            scores.view(count, -1, *scores.shape[1:]).add_(pairs)
    return scores


def _mask(scores: Tensor, tile: Relation, count: int) -> Tensor:
    """Zeroes, in place, what a query may not see. Padded keys come after every real query: no mask
    of their own."""
    if tile.blocked is None:
        return scores.tril_(tile.start)
    scores.view(count, -1, *scores.shape[1:]).masked_fill_(tile.blocked, 0)
    return scores


def add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Adds left @ right to the leading rows of the total; the first product, which has all rows,
    starts it."""
    if total is None:
        return torch.bmm(left, right).to(dtype)
    target = total[:, : left.shape[1]]
    if dtype == left.dtype:
        target.baddbmm_(left, right)
    else:
        target.add_(torch.bmm(left, right))
    return total


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, position_bias, time_bias, plan, alpha, scale):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, k, v, position_bias, time_bias)
        ctx.plan, ctx.alpha, ctx.scale = plan, alpha, scale
        out = torch.zeros_like(v, memory_format=torch.contiguous_format)
        with torch.autocast(q.device.type, enabled=False):
            for number, group in enumerate(plan.groups.groups):
                q_g, k_t, v_g = (
                    split_heads(group, q) * alpha,
                    split_heads_transposed(group, k),
                    split_heads(group, v),
                )
                out_g = torch.empty_like(v_g)
                for tile in plan.tiles(number):
                    scores = _compute_scores(q_g, k_t, tile, len(group), (position_bias, time_bias))
                    weights = _mask(
                        torch.nn.functional.silu(scores, inplace=True), tile, len(group)
                    )
                    out_g[:, tile.start : tile.stop] = torch.bmm(
                        weights.to(v.dtype), v_g[:, : tile.stop]
                    )
                write_heads(out, group, out_g.div_(scale))
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, *biases = ctx.saved_tensors
        plan, alpha = ctx.plan, ctx.alpha
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q, grad_k, grad_v = (
            torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
        )
        grad_biases = [
            None if b is None else torch.zeros_like(b, dtype=torch.promote_types(b.dtype, wide))
            for b in biases
        ]
        with torch.autocast(q.device.type, enabled=False):
            for number, group in enumerate(plan.groups.groups):
                q_g, k_t, v_t = (
                    split_heads(group, q) * alpha,
                    split_heads_transposed(group, k),
                    split_heads_transposed(group, v),
                )
                k_g = k_t.transpose(1, 2).contiguous()
                grad_g = split_heads(group, grad) / ctx.scale
                grad_q_g, grad_k_g, grad_v_g = torch.empty_like(q_g), None, None
                for tile in plan.tiles(number):
                    rows, keys = slice(tile.start, tile.stop), slice(0, tile.stop)
                    scores = _compute_scores(q_g, k_t, tile, len(group), biases)
                    sigmoid = torch.sigmoid(scores)
                    weights = _mask(scores.mul_(sigmoid), tile, len(group))
                    grad_v_g = add_product(
                        grad_v_g, weights.to(v.dtype).transpose(1, 2), grad_g[:, rows], wide
                    )
                    # the slope of SiLU: sigmoid * (1 + score * (1 - sigmoid)) = sigmoid + weight -
                    # weight * sigmoid; where the mask zeroed the weight, it zeroes the product
                    # below as well
                    slope = weights.addcmul_(weights, sigmoid, value=-1).add_(sigmoid)
                    change = torch.bmm(grad_g[:, rows], v_t[:, :, keys])
                    # [n * heads, queries, keys]
                    change = _mask(slope.mul_(change), tile, len(group))
                    for total, index in zip(grad_biases, (tile.distance, tile.bucket), strict=True):
                        if total is not None:
                            pairs = change.view(len(group), -1, *change.shape[1:]).sum(1)
                            pairs = pairs.sum(0, keepdim=True) if len(index) == 1 else pairs
                            total.index_add_(0, index.flatten(), pairs.flatten().to(total.dtype))
                    change = change.to(q.dtype)
                    grad_q_g[:, rows] = torch.bmm(change, k_g[:, keys])
                    grad_k_g = add_product(grad_k_g, change.transpose(1, 2), q_g[:, rows], wide)
                # a group has at least one tile
                assert grad_k_g is not None and grad_v_g is not None
                write_heads(grad_q, group, grad_q_g.mul_(alpha))
                write_heads(grad_k, group, grad_k_g)
                write_heads(grad_v, group, grad_v_g)
        totals = [
            None if g is None else g.to(b.dtype) for g, b in zip(grad_biases, biases, strict=True)
        ]
        return grad_q, grad_k, grad_v, *totals, None, None, None
