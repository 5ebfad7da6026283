"""Jagged causal softmax attention, as of SASRec (arXiv 1808.09781), in plain torch.

    out_i = sum over visible j of softmax_j(alpha * q_i . k_j) * v_j

Visibility, padded groups and tiles are those of `attention.reference`. Backward recomputes the
weights from the logarithms of their sums. Dropout of a weight is a function of the query's random
key and of the position of the attended token in the sample.
"""

from __future__ import annotations

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
    GroupGradients,
    split_heads,
    split_heads_transposed,
    write_heads,
)
from freescale.kernels.attention.triton import WeightDropout
from freescale.kernels.groups import Group
from freescale.random import derive, draw_keep_mask
from freescale.visible import Visible

# Few large tiles suit a GPU better. Scores (samples * heads * queries * keys) of one.
GPU_TILE_BUDGET = 1 << 25
GPU_TILE_ROWS = 1024


def plan_softmax_attention(
    lengths: Tensor,  # [samples] int64, candidates included
    heads: int,
    *,
    candidate_counts: Tensor | None = None,  # [samples] int64
    host: HostSizes | None = None,
    visible: Visible | None = None,
) -> AttentionPlan:
    """Groups and tiles for the layers of a step. Reads the device unless `host` has the sizes."""
    on_cpu = lengths.device.type == "cpu"
    return plan_attention(
        lengths, heads, candidate_counts=candidate_counts, host=host, list_few=False,
        visible=visible,
        budget=TILE_BUDGET if on_cpu else GPU_TILE_BUDGET,
        rows=TILE_ROWS if on_cpu else GPU_TILE_ROWS,
    )  # fmt: skip


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
    """[n * heads, queries, keys] in at least float32, -inf for keys that a query may not see. q is
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
    """Factors of the weights [n * heads, queries, keys], 0 or 1 / keep; None without dropout. keys
    [n, length]: random keys of a group's tokens."""
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
        sums = []  # per group: logarithms of the sums over the keys [n * heads, length, 1]
        with torch.autocast(q.device.type, enabled=False):
            for number, group in enumerate(plan.groups.groups):
                q_g, v_g = split_heads(group, q) * alpha, split_heads(group, v)
                k_t = split_heads_transposed(group, k)
                keys = _pad_keys(dropout, group)
                out_g = torch.empty_like(v_g)
                wide = torch.promote_types(q.dtype, torch.float32)
                sums_g = q_g.new_empty(*q_g.shape[:2], 1, dtype=wide)
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
        plan, dropout, wide = ctx.plan, ctx.dropout, torch.promote_types(q.dtype, torch.float32)
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        # [tokens, heads, 1]: the softmax subtracts it from the gradient of each of its weights
        shared = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        with torch.autocast(q.device.type, enabled=False):
            for (number, group), sums_g in zip(enumerate(plan.groups.groups), sums, strict=True):
                own = GroupGradients(group, q, k, v, ctx.alpha)
                grad_g, shared_g = split_heads(group, grad), split_heads(group, shared)
                keys = _pad_keys(dropout, group)
                for tile in plan.tiles(number):
                    rows = slice(tile.start, tile.stop)
                    weights = _compute_scores(own.q, own.k_t, tile, len(group))
                    weights.sub_(sums_g[:, rows]).exp_()
                    kept = _draw_kept(dropout, keys, tile, weights)
                    change = torch.bmm(grad_g[:, rows], own.v_t[:, :, : tile.stop]).to(wide)
                    used = weights if kept is None else weights * kept
                    change = change if kept is None else change.mul_(kept)
                    own.add_weights(used.to(v.dtype), grad_g[:, rows])
                    change = change.sub_(shared_g[:, rows]).mul_(weights).to(q.dtype)
                    own.add_change(change, rows)
                own.write(*grads)
        return *grads, None, None, None
