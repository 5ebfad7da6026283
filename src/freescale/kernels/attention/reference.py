"""Jagged SiLU attention of HSTU (arXiv 2402.17152), the reference in plain torch.

    out_i = sum over visible j of SiLU(alpha * q_i . k_j + bias_ij) * v_j / scale_length

A token sees itself and the tokens before it in its sample. The last `candidate_counts[s]` tokens of
sample s are candidates: they see the history and themselves, not each other. The divisor is fixed,
never a length of the batch.

Only one tile of scores exists at a time. Backward recomputes them, so memory grows with the tokens,
not with the square of the lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.attention.checks import check_or_plan
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
    # of the same lengths, candidates and timestamps, to make it once for all layers
    plan: AttentionPlan | None = None,
) -> Tensor:  # [tokens, heads, d_v]
    """SiLU attention over jagged samples, in the inputs' dtype (SiLU itself in at least
    float32)."""
    plan = check_or_plan(
        plan, plan_attention, q, k, v, lengths, scale_length, candidate_counts, position_bias,
        time_bias, timestamps,
    )  # fmt: skip
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
    """[tokens, heads, d] -> [n * heads, d, length], contiguous (for a single sample, reshape would
    give a view): products with a transposed right side are several times slower on some
    processors."""
    turned = group.pad(values).permute(0, 2, 3, 1)
    return turned.reshape(-1, values.shape[2], group.length).contiguous()


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
            pairs = bias.to(scores.dtype).index_select(0, index.flatten())
            by_sample = scores.view(count, -1, *scores.shape[1:])
            by_sample.add_(pairs.view(-1, 1, *scores.shape[1:]))
    return scores


def _mask(scores: Tensor, tile: Relation, count: int) -> Tensor:
    """Zeroes, in place, what a query may not see. Padded keys need no mask of their own: they come
    after every real query."""
    if tile.blocked is None:
        return scores.tril_(tile.start)
    scores.view(count, -1, *scores.shape[1:]).masked_fill_(tile.blocked, 0)
    return scores


class GroupGradients:
    """Inputs of a group in the layouts that backward needs, and the gradients of its queries, keys
    and values, summed tile by tile."""

    def __init__(self, group: Group, q: Tensor, k: Tensor, v: Tensor, alpha: float) -> None:
        self.group, self.alpha = group, alpha
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.q = split_heads(group, q) * alpha
        self.k_t, self.v_t = split_heads_transposed(group, k), split_heads_transposed(group, v)
        self._k = self.k_t.transpose(1, 2).contiguous()
        self._of_q = torch.empty_like(self.q)
        self._of_k: Tensor | None = None
        self._of_v: Tensor | None = None

    def add_weights(self, weights: Tensor, grad: Tensor) -> None:
        """weights [n * heads, queries, keys] in the values' dtype, grad [n * heads, queries, d]."""
        self._of_v = _add_product(self._of_v, weights.transpose(1, 2), grad, self.wide)

    def add_change(self, change: Tensor, rows: slice) -> None:
        """Gradients of the scores of the queries `rows` [n * heads, queries, keys]."""
        self._of_q[:, rows] = torch.bmm(change, self._k[:, : rows.stop])
        self._of_k = _add_product(self._of_k, change.transpose(1, 2), self.q[:, rows], self.wide)

    def write(self, *targets: Tensor) -> None:
        """Writes the gradients of q, k and v."""
        assert self._of_k is not None and self._of_v is not None  # a group has at least one tile
        sums = self._of_q.mul_(self.alpha), self._of_k, self._of_v
        for target, own in zip(targets, sums, strict=True):
            write_heads(target, self.group, own)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Adds left @ right to the leading rows of the total. The first product, which has all rows,
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
                q_g, v_g = split_heads(group, q) * alpha, split_heads(group, v)
                k_t = split_heads_transposed(group, k)
                out_g = torch.empty_like(v_g)
                for tile in plan.tiles(number):
                    scores = _compute_scores(q_g, k_t, tile, len(group), (position_bias, time_bias))
                    weights = torch.nn.functional.silu(scores, inplace=True)
                    weights = _mask(weights, tile, len(group)).to(v.dtype)
                    out_g[:, tile.start : tile.stop] = torch.bmm(weights, v_g[:, : tile.stop])
                write_heads(out, group, out_g.div_(scale))
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, *biases = ctx.saved_tensors
        plan, wide = ctx.plan, torch.promote_types(q.dtype, torch.float32)
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        grad_biases = [
            None if b is None else torch.zeros_like(b, dtype=torch.promote_types(b.dtype, wide))
            for b in biases
        ]
        with torch.autocast(q.device.type, enabled=False):
            for number, group in enumerate(plan.groups.groups):
                own, grad_g = GroupGradients(group, q, k, v, ctx.alpha), split_heads(group, grad)
                grad_g = grad_g / ctx.scale
                for tile in plan.tiles(number):
                    rows = slice(tile.start, tile.stop)
                    scores = _compute_scores(own.q, own.k_t, tile, len(group), biases)
                    sigmoid = torch.sigmoid(scores)
                    weights = _mask(scores.mul_(sigmoid), tile, len(group))
                    own.add_weights(weights.to(v.dtype), grad_g[:, rows])
                    # the slope of SiLU: sigmoid * (1 + score * (1 - sigmoid)) = sigmoid + weight -
                    # weight * sigmoid; masked weights are wrong here, but the mask below zeroes
                    # the product
                    slope = weights.addcmul_(weights, sigmoid, value=-1).add_(sigmoid)
                    change = torch.bmm(grad_g[:, rows], own.v_t[:, :, : tile.stop])
                    # [n * heads, queries, keys]
                    change = _mask(slope.mul_(change), tile, len(group))
                    for total, index in zip(grad_biases, (tile.distance, tile.bucket), strict=True):
                        if total is not None:
                            pairs = change.view(len(group), -1, *change.shape[1:]).sum(1)
                            pairs = pairs.sum(0, keepdim=True) if len(index) == 1 else pairs
                            total.index_add_(0, index.flatten(), pairs.flatten().to(total.dtype))
                    own.add_change(change.to(q.dtype), rows)
                own.write(*grads)
        totals = [
            None if g is None else g.to(b.dtype) for g, b in zip(grad_biases, biases, strict=True)
        ]
        return *grads, *totals, None, None, None
