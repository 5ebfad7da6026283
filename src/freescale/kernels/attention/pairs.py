"""Attention of short samples on a CPU: over a list of the pairs of tokens that see each other.

Samples of a few events have few such pairs: 900 for 180 tokens, of the 32,400 in their square. One
operation on that square, or moving samples into padded groups, takes longer than everything here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.attention.checks import Sizes
from freescale.visible import Visible


@dataclass(frozen=True)
class Pairs:
    """Queries and the keys that they see, ordered by query, then key."""

    query: Tensor  # [pairs] int64: tokens
    key: Tensor  # [pairs] int64
    distance: Tensor  # [pairs] int64: difference of positions


def count_pairs(sizes: Sizes, visible: Visible | None = None) -> int:
    """The number of pairs (query, visible key), including each token with itself."""
    history, candidates = sizes.history, sizes.lengths - sizes.history
    if visible is not None:
        return int(visible.count_pairs(history, candidates).sum())
    return int((history * (history + 1) // 2 + candidates * (history + 1)).sum())


def list_pairs(sizes: Sizes, visible: Visible | None = None) -> Pairs:
    """Lists all pairs of a batch, on the CPU."""
    lengths, numbers = sizes.lengths, np.arange(sizes.lengths.sum())
    start = np.repeat(np.cumsum(lengths) - lengths, lengths)  # [tokens], like the two below
    history = np.repeat(sizes.history, lengths)
    position = np.minimum(numbers - start, history)  # candidates come right after the history
    seen = position + 1  # the history up to the token, and the token itself
    if visible is not None:
        seen = np.minimum(seen, visible.first + visible.last)
    ends = np.cumsum(seen)
    first = start - (ends - seen)
    key = np.repeat(first, seen) + np.arange(seen.sum())
    if visible is not None:  # those behind the first ones come later
        skipped = np.repeat(position + 1 - seen, seen)
        key += np.where(key - np.repeat(start, seen) < visible.first, 0, skipped)
    key[ends - 1] = numbers  # a candidate sees itself, not the first candidate
    query = np.repeat(numbers, seen)
    distance = position[query] - position[key]
    return Pairs(*(torch.from_numpy(x) for x in (query, key, distance)))


class PairsAttention(torch.autograd.Function):
    """As `attention.reference`, in at least float32 throughout."""

    @staticmethod
    def forward(ctx, q, k, v, position_bias, time_bias, pairs, bucket, alpha, scale):  # type: ignore[no-untyped-def]
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = _multiply(_pick(q, pairs.query, wide), _pick(k, pairs.key, wide)).mul_(alpha)
        for bias, index in ((position_bias, pairs.distance), (time_bias, bucket)):
            if bias is not None:
                scores += bias.to(wide).index_select(0, index)[:, None]
        weights = torch.nn.functional.silu(scores).div_(scale)  # [pairs, heads]
        out = _sum(_pick(v, pairs.key, wide).mul_(weights[..., None]), pairs.query, v)
        ctx.save_for_backward(q, k, v, position_bias, time_bias, scores)
        ctx.pairs, ctx.bucket, ctx.alpha, ctx.scale = pairs, bucket, alpha, scale
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, *biases, scores = ctx.saved_tensors
        query, key, wide = ctx.pairs.query, ctx.pairs.key, scores.dtype
        grad_out = _pick(grad, query, wide).div_(ctx.scale)  # [pairs, heads, d_v]
        sigmoid = torch.sigmoid(scores)
        weights = scores * sigmoid
        change = _multiply(grad_out.clone(), _pick(v, key, wide))  # [pairs, heads]
        grad_v = _sum(grad_out.mul_(weights[..., None]), key, v)
        # the slope of SiLU: sigmoid * (1 + score * (1 - sigmoid))
        change.mul_(weights.addcmul_(weights, sigmoid, value=-1).add_(sigmoid))
        by_pair = change.sum(1)
        totals = [
            None
            if bias is None
            else torch.zeros_like(bias, dtype=wide).index_add_(0, index, by_pair).to(bias.dtype)
            for bias, index in zip(biases, (ctx.pairs.distance, ctx.bucket), strict=True)
        ]
        change.mul_(ctx.alpha)
        grad_q = _sum(_pick(k, key, wide).mul_(change[..., None]), query, q)
        grad_k = _sum(_pick(q, query, wide).mul_(change[..., None]), key, k)
        return grad_q, grad_k, grad_v, *totals, None, None, None, None


def _pick(values: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, heads, d] -> [pairs, heads, d], a copy."""
    return values.index_select(0, index).to(dtype)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """[pairs, heads, d] twice -> [pairs, heads] products. Overwrites the left."""
    return left.mul_(right).sum(-1)


def _sum(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """[pairs, heads, d] -> [tokens, heads, d]. A CPU adds in the order of the pairs."""
    total = values.new_zeros(like.shape)
    return total.index_add_(0, index, values).to(like.dtype)
