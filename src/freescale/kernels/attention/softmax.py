"""Jagged causal softmax attention, as of SASRec (arXiv 1808.09781), in plain torch.

    out_i = sum over j that i may see of softmax_j(alpha * q_i . k_j) * v_j

Who sees whom is as in `attention`: a token sees itself and what is before it in its sample;
candidates see the history and themselves. Samples lie in padded groups of similar length. Scores
exist one tile at a time, in forward and in backward, which computes them again from the logarithms
of the sums: memory grows with the tokens, not with the square of the lengths. What is dropped of
the weights is a function of the query's key and the key's place in the sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from freescale.batch import HostSizes
from freescale.kernels.attention.checks import check_same_device
from freescale.kernels.attention.plan import (
    TILE_BUDGET,
    TILE_ROWS,
    AttentionPlan,
    Relation,
    plan_attention,
)
from freescale.kernels.attention.reference import (
    add_product,
    split_heads,
    split_heads_transposed,
    write_heads,
)
from freescale.kernels.groups import Group
from freescale.random import derive, draw_keep_mask

# A GPU is better off with few large tiles: scores (samples * heads * queries * keys) of one.
GPU_TILE_BUDGET = 1 << 25
GPU_TILE_ROWS = 1024


class WeightDropout(NamedTuple):
    """What is dropped of the weights of an attention."""

    keys: Tensor  # [tokens] int64
    stream: int  # which of the draws that a key gives: layers drop different weights
    keep: float  # the share that is kept


def plan_softmax_attention(
    lengths: Tensor,  # [samples] int64, candidates included
    heads: int,
    *,
    candidate_counts: Tensor | None = None,  # [samples] int64
    host: HostSizes | None = None,
) -> AttentionPlan:
    """The groups and tiles that the layers of a step share. Reads from the device what `host` does
    not know."""
    on_cpu = lengths.device.type == "cpu"
    return plan_attention(
        lengths,
        heads,
        candidate_counts=candidate_counts,
        host=host,
        budget=TILE_BUDGET if on_cpu else GPU_TILE_BUDGET,
        rows=TILE_ROWS if on_cpu else GPU_TILE_ROWS,
        list_few=False,
    )


def softmax_attention(
    q: Tensor,  # [tokens, heads, d]
    k: Tensor,  # [tokens, heads, d]
    v: Tensor,  # [tokens, heads, d]
    plan: AttentionPlan,
    *,
    alpha: float,
    dropout: WeightDropout | None = None,
) -> Tensor:  # [tokens, heads, d]
    """Softmax attention over jagged samples, in the inputs' dtype (the softmax itself in at least
    float32)."""
    if q.ndim != 3 or k.shape != q.shape or v.shape != q.shape:
        raise ValueError(
            "q, k and v must be [tokens, heads, d] alike, not "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    if plan.tokens != q.shape[0] or plan.heads != q.shape[1]:
        raise ValueError(
            f"the plan is for {plan.tokens} tokens and {plan.heads} heads, not "
            f"{q.shape[0]} and {q.shape[1]}"
        )
    check_same_device(q=q, k=k, v=v, plan=plan.lengths)
    out: Tensor = _SoftmaxAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, plan, float(alpha), dropout
    )
    return out


def _compute_scores(q: Tensor, k_t: Tensor, tile: Relation, count: int) -> Tensor:
    """[n * heads, queries, keys] in at least float32, -inf where a query may not look. q is
    scaled. Padded keys come after every real query."""
    scores = torch.bmm(q[:, tile.start : tile.stop], k_t[:, :, : tile.stop])
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if tile.blocked is None:
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
        return scores.masked_fill_(later.triu_(tile.start + 1), -torch.inf)
    scores.view(count, -1, *scores.shape[1:]).masked_fill_(tile.blocked, -torch.inf)
    return scores


def _draw_kept(
    dropout: WeightDropout | None, keys: Tensor | None, tile: Relation, like: Tensor
) -> Tensor | None:
    """Factors of the weights [n * heads, queries, keys], 0 or 1 / keep; None where nothing is
    dropped. keys [n, length]: of a group's tokens."""
    if dropout is None or keys is None:
        return None
    heads = torch.arange(like.shape[0] // keys.shape[0], device=keys.device)
    own = keys[:, None, tile.start : tile.stop]  # [n, 1, queries]
    drawn = derive(own, dropout.stream, heads[:, None])  # [n, heads, queries]
    kept = draw_keep_mask(drawn.flatten(), tile.stop, dropout.keep)
    return kept.view(like.shape).to(like.dtype).mul_(1 / dropout.keep)


def _pad_keys(dropout: WeightDropout | None, group: Group) -> Tensor | None:
    return None if dropout is None else group.pad(dropout.keys)


class _SoftmaxAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, alpha, dropout):  # type: ignore[no-untyped-def]
        ctx.plan, ctx.alpha, ctx.dropout = plan, alpha, dropout
        out = torch.zeros_like(v, memory_format=torch.contiguous_format)
        sums = []  # of each group: logarithms of the sums over the keys [n * heads, length, 1]
        with torch.autocast(q.device.type, enabled=False):
            for number, group in enumerate(plan.groups.groups):
                q_g, k_t, v_g = (
                    split_heads(group, q) * alpha,
                    split_heads_transposed(group, k),
                    split_heads(group, v),
                )
                keys = _pad_keys(dropout, group)
                out_g = torch.empty_like(v_g)
                sums_g = q_g.new_empty(
                    *q_g.shape[:2], 1, dtype=torch.promote_types(q.dtype, torch.float32)
                )
                for tile in plan.tiles(number):
                    rows = slice(tile.start, tile.stop)
                    scores = _compute_scores(q_g, k_t, tile, len(group))
                    torch.logsumexp(scores, -1, keepdim=True, out=sums_g[:, rows])
                    weights = scores.sub_(sums_g[:, rows]).exp_()
                    kept = _draw_kept(dropout, keys, tile, weights)
                    weights = weights if kept is None else weights.mul_(kept)
                    out_g[:, rows] = torch.bmm(weights.to(v.dtype), v_g[:, : tile.stop])
                write_heads(out, group, out_g)
                sums.append(sums_g)
        ctx.save_for_backward(q, k, v, out, *sums)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, out, *sums = ctx.saved_tensors
        plan, alpha, dropout = ctx.plan, ctx.alpha, ctx.dropout
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q, grad_k, grad_v = (
            torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
        )
        # [tokens, heads, 1]: what the softmax takes from the gradient of each of its weights
        shared = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        with torch.autocast(q.device.type, enabled=False):
            for (number, group), sums_g in zip(enumerate(plan.groups.groups), sums, strict=True):
                q_g, k_t, v_t = (
                    split_heads(group, q) * alpha,
                    split_heads_transposed(group, k),
                    split_heads_transposed(group, v),
                )
                k_g = k_t.transpose(1, 2).contiguous()
                grad_g, shared_g = split_heads(group, grad), split_heads(group, shared)
                keys = _pad_keys(dropout, group)
                grad_q_g, grad_k_g, grad_v_g = torch.empty_like(q_g), None, None
                for tile in plan.tiles(number):
                    rows, seen = slice(tile.start, tile.stop), slice(0, tile.stop)
                    weights = _compute_scores(q_g, k_t, tile, len(group))
                    weights.sub_(sums_g[:, rows]).exp_()
                    kept = _draw_kept(dropout, keys, tile, weights)
                    change = torch.bmm(grad_g[:, rows], v_t[:, :, seen]).to(wide)
                    used = weights if kept is None else weights * kept
                    change = change if kept is None else change.mul_(kept)
                    grad_v_g = add_product(
                        grad_v_g, used.to(v.dtype).transpose(1, 2), grad_g[:, rows], wide
                    )
                    change = change.sub_(shared_g[:, rows]).mul_(weights).to(q.dtype)
                    grad_q_g[:, rows] = torch.bmm(change, k_g[:, seen])
                    grad_k_g = add_product(grad_k_g, change.transpose(1, 2), q_g[:, rows], wide)
                # a group has at least one tile
                assert grad_k_g is not None and grad_v_g is not None
                write_heads(grad_q, group, grad_q_g.mul_(alpha))
                write_heads(grad_k, group, grad_k_g)
                write_heads(grad_v, group, grad_v_g)
        return grad_q, grad_k, grad_v, None, None, None
