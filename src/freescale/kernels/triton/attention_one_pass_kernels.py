"""The backward of `attention` in one pass over the pairs: 5 products instead of the 7 of two.

A program holds a tile of keys, sums their gradients in registers and adds its share of the queries'
gradients to sums in memory. For the same bits every time the shares of one tile of queries are
added in a fixed order, from its own keys back to the sample's first: programs take turns, counted
in memory. A program waits only for programs that start before it. They go through the queries from
the diagonal on, so that the program of the keys behind is one tile of queries ahead anyway.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.triton.attention_kernels import (
    _allowed,
    _double_slope,
    _load_tile,
    _split_queries,
    _store,
    _tanh,
)


@triton.jit
def _await_turn(share, turn, number, INLINE: tl.constexpr):
    """Returns the share when `number` warps have finished their turn. Interpreted programs run one
    after the other: a turn that has not come never will, and the share becomes NaN."""
    if INLINE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .s32 done; await: ld.acquire.gpu.global.s32 done, [$1]; "
            "setp.lt.s32 p, done, $2; @p bra await; mov.s32 $0, done; }",
            "=r,l,r", [turn.to(tl.int64), number], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        share += tl.where(tl.load(turn) == number, 0.0, float("nan"))
    return share


@triton.jit
def _finish_turn(turn, pending, WARPS: tl.constexpr, INLINE: tl.constexpr):
    """Counts this program's warps, each when its additions are visible; none unless `pending`."""
    if INLINE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 lane; bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; "
            "setp.lt.u32 p, lane, $2; @p red.release.gpu.global.add.s32 [$1], 1; mov.s32 $0, 0; }",
            "=r,l,r", [turn.to(tl.int64), pending.to(tl.int32)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        tl.atomic_add(turn, WARPS, mask=pending)


@triton.jit
def _add_share(sums, offsets, share, present, FIRST: tl.constexpr, INLINE: tl.constexpr):
    """sums[offsets] + share where `present`, or share alone for the FIRST. As assembly it is done
    in the layout of the product, two neighbouring columns at a time."""
    if INLINE:
        if FIRST:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v2.f32 [$2], {$4, $5}; "
                "mov.s32 $0, 0; mov.s32 $1, 0; }",
                "=r,=r,l,l,f,f,r,r", [(sums + offsets).to(tl.int64), share, present.to(tl.int32)],
                dtype=tl.int32, is_pure=False, pack=2,
            )  # fmt: skip
        else:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $6, 0; "
                "@p red.relaxed.gpu.global.add.v2.f32 [$2], {$4, $5}; "
                "mov.s32 $0, 0; mov.s32 $1, 0; }",
                "=r,=r,l,l,f,f,r,r", [(sums + offsets).to(tl.int64), share, present.to(tl.int32)],
                dtype=tl.int32, is_pure=False, pack=2,
            )  # fmt: skip
    else:
        before = 0.0 if FIRST else tl.load(sums + offsets, mask=present, other=0.0)
        tl.store(sums + offsets, before + share, mask=present)


@triton.jit
def _add_gradients(
    total_k, total_v, k, v, q_desc, grad_desc, sums, turns, factor, j, row, query, head, sample,
    half_alpha, HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, FAST: tl.constexpr, INLINE: tl.constexpr, PRECISION: tl.constexpr,
    CANDIDATES: tl.constexpr, WARPS: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """total_k and total_v plus what the queries [query, query + M) add for the keys j; adds to the
    sums of these queries what the keys add."""
    start, length, history, _ = sample
    i = query + tl.arange(0, M)
    q = q_desc.load([start + query, head * D_QK])
    grad = grad_desc.load([start + query, head * D_V])
    if MASKED:
        q = tl.where((i < length)[:, None], q, 0.0)
        grad = tl.where((i < length)[:, None], grad, 0.0)
        seen = _allowed(i[None, :], j[:, None], length, history, CANDIDATES)
    half = tl.dot(k, q.T, input_precision=PRECISION) * half_alpha  # [N, M]
    if not MASKED:
        change = tl.dot(v, grad.T, input_precision=PRECISION)
    t = _tanh(half, FAST)
    weights = half * t + half
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    total_v = tl.dot(weights.to(grad.dtype), grad, total_v, input_precision=PRECISION)
    if MASKED:
        change = tl.dot(v, grad.T, input_precision=PRECISION)
    change = change * _double_slope(half, t)
    if MASKED:
        change = tl.where(seen, change, 0.0)
    change = change.to(q.dtype)
    total_k = tl.dot(change, q, total_k, input_precision=PRECISION)
    share = tl.dot(change.T, k, input_precision=PRECISION) * factor
    turn = turns + (start + query).to(tl.int64) * HEADS + head
    if not FIRST:
        # of the tile before: by now its additions have arrived
        _finish_turn(turn - M * HEADS, query > row + N, WARPS, INLINE)
        own = query // N
        if CANDIDATES:
            own = tl.minimum(own, tl.cdiv(history, N))
        share = _await_turn(share, turn, (own - row // N) * WARPS, INLINE)
    offsets = (start + i).to(tl.int64)[:, None] * (HEADS * D_QK) + head * D_QK
    offsets += tl.arange(0, D_QK)[None, :]
    present = (i < length)[:, None] if MASKED else (i >= 0)[:, None]
    _add_share(sums, offsets, share, present, FIRST, INLINE)
    if FIRST:
        _finish_turn(turn, row >= 0, WARPS, INLINE)
    return total_k, total_v


@triton.jit
def backward_one_pass_kernel(
    q_desc, k_desc, v_desc, grad_desc, sums, turns, grad_k, grad_v, tiles,
    half_alpha, factor, inverse_scale,
    HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FAST: tl.constexpr, INLINE: tl.constexpr, PRECISION: tl.constexpr, CANDIDATES: tl.constexpr,
    STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys [row, row + N) and of their values; their share of the queries'
    gradients goes to `sums` [tokens, HEADS * D_QK] float32. `turns` [tokens, HEADS] int32 starts
    at zero."""
    head, sample, row = _load_tile(tiles, HEADS)
    start, length, history, _ = sample
    j = row + tl.arange(0, N)
    diagonal, first, last, rest = _split_queries(row, length, history, M, N, CANDIDATES)
    # the next sample's keys meet zeros in the queries' gradients
    k = tl.where((j < length)[:, None], k_desc.load([start + row, head * D_QK]), 0.0)
    v = v_desc.load([start + row, head * D_V])
    total_k = tl.zeros([N, D_QK], tl.float32)
    total_v = tl.zeros([N, D_V], tl.float32)
    for number in tl.range(0, diagonal, num_stages=MASKED_STAGES):
        total_k, total_v = _add_gradients(
            total_k, total_v, k, v, q_desc, grad_desc, sums, turns, factor, j, row,
            row + number * M, head, sample, half_alpha, HEADS, D_QK, D_V, M, N, FAST, INLINE,
            PRECISION, CANDIDATES, WARPS, MASKED=True, FIRST=True,
        )  # fmt: skip
    for query in tl.range(first, last, M, num_stages=STAGES):
        total_k, total_v = _add_gradients(
            total_k, total_v, k, v, q_desc, grad_desc, sums, turns, factor, j, row, query, head,
            sample, half_alpha, HEADS, D_QK, D_V, M, N, FAST, INLINE, PRECISION, CANDIDATES, WARPS,
            MASKED=False, FIRST=False,
        )  # fmt: skip
    for number in tl.range(0, rest, num_stages=MASKED_STAGES):
        total_k, total_v = _add_gradients(
            total_k, total_v, k, v, q_desc, grad_desc, sums, turns, factor, j, row,
            last + number * M, head, sample, half_alpha, HEADS, D_QK, D_V, M, N, FAST, INLINE,
            PRECISION, CANDIDATES, WARPS, MASKED=True, FIRST=False,
        )  # fmt: skip
    end = last + (rest - 1) * M  # the last tile of queries
    turn = turns + (start + end).to(tl.int64) * HEADS + head
    _finish_turn(turn, end >= first, WARPS, INLINE)
    _store(grad_k, HEADS * D_QK, start, j, length, head * D_QK, total_k * factor, D_QK)
    _store(grad_v, HEADS * D_V, start, j, length, head * D_V, total_v * inverse_scale, D_V)
