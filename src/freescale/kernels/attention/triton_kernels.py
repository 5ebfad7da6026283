"""The Triton kernels of `attention.triton`: forward and backward, with SiLU or a softmax.

One program works on one tile of one head: queries in forward, queries or keys in backward. Tiles
without a mask run in a separate loop with the same body. TMA descriptors span the whole batch, so a
tile at a sample's end also reads the next sample's tokens: the mask drops their scores, and their
rows are zeroed before a product (0 * inf is not 0).

SiLU is computed from h = score / 2 and t = tanh(h), with one instruction of the special function
unit instead of two:
    SiLU(score) = h * (1 + t)        2 * SiLU'(score) = (1 + t) * (1 + h * (1 - t))
The factor 1/2 of the slope, alpha and 1 / scale_length are applied once, to the finished sums.

A softmax keeps the highest score and the sum of each query while it goes over the keys. Backward
recomputes the weights from the logarithms of the sums, all in powers of two.

Backward takes seven products instead of five: the kernel for keys and the one for queries both
compute the scores and their gradients. A single kernel that adds to the queries' gradient in a
fixed order is half as fast (223 TFLOP/s against 444 for heads of 128): its programs wait for their
turns. Storing the scores instead of recomputing them is slower at every width.

The bias of a score is read from a table of all pairs or computed here. `triton_bias_kernels` has
the kernel that fills the table, and the sums of the biases' gradients.

With `first` and `last`, a query sees the first keys and the last ones; tiles between are not
visited.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.plan_columns import PAIR_KEYS, PAIR_QUERIES, TileColumn
from freescale.kernels.attention.triton_bias_sums_kernels import (
    BUCKETS_PER_OCTAVE,
    TILE_COLUMNS,
    TILE_HISTORY,
    TILE_LENGTH,
    TILE_ROW,
    TILE_SUMS,
    _add_to_buckets,
    _finish_buckets,
    _store_distances,
)
from freescale.kernels.draw_kernels import _derive, _draw_quads

LOWEST = tl.constexpr(-1e30)  # a score below all others; differences to it are finite
ROWS_OF_PAIRS = tl.constexpr(PAIR_QUERIES)
COLUMNS_OF_PAIRS = tl.constexpr(PAIR_KEYS)

VARYING = ["tokens", "first", "last", "layer", "threshold", "farthest", "buckets"]

# Columns of the plan's tables: kernels read only globals that are constexpr.
TILE_START = tl.constexpr(TileColumn.START.value)
TILE_PAIRS = tl.constexpr(TileColumn.PAIRS.value)
TILE_FIRST = tl.constexpr(TileColumn.FIRST.value)


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _allowed(i, j, length, history, visible, CANDIDATES: tl.constexpr):
    """Whether query i sees key j. Rows past the sample's end see nothing."""
    first, last = visible
    seen = (j <= i) & (i < length)
    if CANDIDATES:
        seen = seen & ((j < history) | (j == i))
    if last is not None:
        near = tl.minimum(i, history) - tl.minimum(j, history) < last
        seen = seen & (near | (j < first))
    return seen


@triton.jit
def _derive_keys(dropout, start, i, length, head):
    """[M]: the keys of the dropout of the queries i of a head; anything without dropout."""
    keys, layer, _, _ = dropout
    own = i
    if keys is not None:
        own = tl.load(keys + start + i, mask=i < length, other=0).to(tl.uint64, bitcast=True)
        own = _derive(_derive(own, layer), head)
    return own


@triton.jit
def _drop(weights, own, key, dropout, M: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr):
    """weights [M, N] (TURNED: [N, M]) of the keys [key, key + N) with dropout; `own` [M] are the
    keys of the queries' draws."""
    keys, _, threshold, share = dropout
    if keys is not None:
        kept = _draw_quads(own, key // 4 + tl.arange(0, N // 4), threshold, M, N)
        if TURNED:
            kept = kept.T
        weights = tl.where(kept, weights * share, 0.0)
    return weights


@triton.jit
def _look_up(table, index, INLINE: tl.constexpr):
    """Entries of a float32 table. The compiler treats assembly as arithmetic, in the layout of the
    scores; a load would go through shared memory."""
    if INLINE:
        return tl.inline_asm_elementwise(
            "{ .reg .u64 a; mad.wide.s32 a, $1, 4, $2; ld.global.nc.f32 $0, [a]; }",
            "=f,r,l", [index, table.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.load(table + index)


@triton.jit
def _edge(edges, low, high, INLINE: tl.constexpr):
    """The shortest time of bucket `high`, read only if the estimate leaves two buckets open."""
    if INLINE and edges.dtype.element_ty == tl.int32:
        return tl.inline_asm_elementwise(
            "{ .reg .u64 a; .reg .pred p; setp.ne.s32 p, $1, $2; mad.wide.s32 a, $2, 4, $3; "
            "mov.s32 $0, 0;"
            " @p ld.global.nc.s32 $0, [a]; }",
            "=r,r,r,l", [low, high, edges.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.load(edges + high, mask=low != high, other=0)


@triton.jit
def _distance(i, j, history, farthest):
    """Distance between the positions of queries i and keys j. All candidates have the position
    right after the history."""
    return tl.minimum(tl.maximum(tl.minimum(i, history) - tl.minimum(j, history), 0), farthest)


@triton.jit
def _bucket(i, j, start, length, times, edges, buckets, INLINE: tl.constexpr):
    """floor(log(time between) / 0.301), exact: if the estimate in float32 is too close to an edge,
    comparing with the edge decides."""
    later = tl.load(times + start + i, mask=i < length, other=0)
    earlier = tl.load(times + start + j, mask=j < length, other=0)
    elapsed = tl.maximum(later - earlier, 1)
    rounded = elapsed.to(tl.float32)
    if INLINE:  # tl.log2 is a polynomial, more exact than needed here
        octaves = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [rounded], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        octaves = tl.log2(rounded)
    estimate = octaves * BUCKETS_PER_OCTAVE
    low = tl.minimum(tl.maximum(estimate - 1e-3, 0.0).to(tl.int32), buckets)
    high = tl.minimum((estimate + 1e-3).to(tl.int32), buckets)
    return tl.where(elapsed >= _edge(edges, low, high, INLINE), high, low)


@triton.jit
def _find_pairs(pairs, query, key):
    """Row and column in the table of pair biases for queries from `query` and keys from `key`."""
    above, before = query // ROWS_OF_PAIRS, key // COLUMNS_OF_PAIRS
    block = pairs + above * (above + 1) + before
    row = (block - above) * ROWS_OF_PAIRS + query
    return row, key - before * COLUMNS_OF_PAIRS


@triton.jit
def _half_scores(
    products, half_alpha, i, j, query, key, sample, bias, pairs_desc, INLINE: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Half of alpha * products + bias, for products of queries i from `query` and keys j from
    `key`. Queries are rows, or columns if TURNED. The bias is read from the table of pair biases if
    there is one, else computed."""
    half = products * half_alpha
    start, length, history, pairs = sample
    position_bias, farthest, time_bias, edges, times, buckets = bias
    if pairs_desc is not None:
        at, column = _find_pairs(pairs, query, key)
        of_pairs = pairs_desc.load([at, column])
        if TURNED:
            of_pairs = of_pairs.T
        half += of_pairs.to(tl.float32)
    else:
        if position_bias is not None:
            half += 0.5 * _look_up(position_bias, _distance(i, j, history, farthest), INLINE)
        if time_bias is not None:
            half += 0.5 * _look_up(
                time_bias, _bucket(i, j, start, length, times, edges, buckets, INLINE), INLINE
            )
    return half


@triton.jit
def _double_slope(half, t):
    inner = (half + 1) - half * t
    return inner * t + inner


@triton.jit
def _load_tile(tiles, HEADS: tl.constexpr):
    """The program's head, its sample (start, length, history, pairs) and the first row of its
    tile."""
    program = tl.program_id(0)
    tile = tiles + program // HEADS * TILE_COLUMNS
    sample = (
        tl.load(tile + TILE_START),
        tl.load(tile + TILE_LENGTH),
        tl.load(tile + TILE_HISTORY),
        tl.load(tile + TILE_PAIRS),
    )
    return program % HEADS, sample, tl.load(tile + TILE_ROW)


@triton.jit
def _store(pointer, stride, start, rows, length, column, values, WIDTH: tl.constexpr):
    offsets = (start + rows).to(tl.int64)[:, None] * stride + column + tl.arange(0, WIDTH)[None, :]
    tl.store(pointer + offsets, values.to(pointer.dtype.element_ty), mask=(rows < length)[:, None])


@triton.jit
def _split_keys(
    row, length, history, visible, M: tl.constexpr, N: tl.constexpr, CANDIDATES: tl.constexpr
):
    """How the queries [row, row + M) see keys: (head, near, full, partial, start, edge, masked).

    They see the keys [0, head) and [near, full) without a mask. With one, in `masked` tiles: those
    of [head, first), if `partial` is 1; those of [start, near); `edge` tiles from `full`; and the
    diagonal."""
    first, last = visible
    full = row
    edge = 0
    if CANDIDATES:
        full = tl.minimum(row, history) // N * N
        # else the diagonal starts at full
        edge = tl.where(row > full, tl.cdiv(history - full, N), 0)
    masked = edge + tl.cdiv(tl.minimum(M, length - row), N)
    head, near, partial, start = 0, 0, 0, 0
    if last is not None:
        # tiles that some, and that all queries see because they are near
        lowest = tl.maximum(tl.minimum(row, history) - last + 1, 0)
        highest = tl.maximum(tl.minimum(row + M - 1, history) - last + 1, 0)
        start = tl.minimum(lowest // N * N, full)
        near = tl.minimum(tl.cdiv(highest, N) * N, full)
        early = tl.minimum(first, start)
        head = early // N * N
        partial = (early > head).to(tl.int32)
        masked += (near - start) // N + partial
    return head, near, full, partial, start, edge, masked


@triton.jit
def _find_unmasked(number, head, near, visible, N: tl.constexpr):
    """The first key of a tile without a mask."""
    key = number * N
    if visible[1] is not None:
        key = tl.where(key < head, key, near + key - head)
    return key


@triton.jit
def _find_masked(number, row, parts, visible, N: tl.constexpr):
    """The first key of a tile with a mask."""
    head, near, full, partial, start, edge, _ = parts
    before = partial + (near - start) // N
    later = number - before
    key = tl.where(later < edge, full + later * N, row + (later - edge) * N)
    if visible[1] is not None:
        early = tl.where(number < partial, head, start + (number - partial) * N)
        key = tl.where(number < before, early, key)
    return key


@triton.jit
def _add_values(
    state, q, own, k_desc, v_desc, pairs_desc, i, row, key, head, sample, visible, dropout, bias,
    factor,
    D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FAST: tl.constexpr,
    INLINE: tl.constexpr, PRECISION: tl.constexpr, CANDIDATES: tl.constexpr, SOFTMAX: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """state: total [M, D_V] plus the values of the keys [key, key + N), weighted for the queries i;
    with a softmax also the highest scores and the sums of weights [M]."""
    total, top, sums = state
    start, length, history, _ = sample
    k = k_desc.load([start + key, head * D_QK])
    products = tl.dot(q, k.T, input_precision=PRECISION)
    j = key + tl.arange(0, N)
    if MASKED:
        seen = _allowed(i[:, None], j[None, :], length, history, visible, CANDIDATES)
    if SOFTMAX:
        scores = products * factor
        if MASKED:
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        rescale = tl.exp2(top - highest)
        sums = sums * rescale + tl.sum(weights, 1)
        total *= rescale[:, None]
        top = highest
        weights = _drop(weights, own, key, dropout, M, N, TURNED=False)
    else:
        half = _half_scores(
            products, factor, i[:, None], j[None, :], row, key, sample, bias, pairs_desc, INLINE,
            TURNED=False,
        )  # fmt: skip
        weights = half * _tanh(half, FAST) + half
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
    v = v_desc.load([start + key, head * D_V])
    if MASKED:
        v = tl.where((j < length)[:, None], v, 0.0)
    return tl.dot(weights.to(v.dtype), v, total, input_precision=PRECISION), top, sums


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q_desc, k_desc, v_desc, pairs_desc, out, logarithms, tiles, tokens, first, last,
    keys, layer, threshold, share,
    position_bias, farthest, time_bias, edges, times, buckets, score_factor, inverse_scale,
    HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FAST: tl.constexpr, INLINE: tl.constexpr, PRECISION: tl.constexpr, CANDIDATES: tl.constexpr,
    SOFTMAX: tl.constexpr, STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    """The output of the queries [row, row + M), summed over the keys in their order. score_factor:
    of the products; half of alpha, or alpha in powers of two for a softmax, whose `logarithms`
    [HEADS, tokens] are those of its sums."""
    head, sample, row = _load_tile(tiles, HEADS)
    start, length, history, _ = sample
    visible, dropout = (first, last), (keys, layer, threshold, share)
    bias = (position_bias, farthest, time_bias, edges, times, buckets)
    i = row + tl.arange(0, M)
    parts = _split_keys(row, length, history, visible, M, N, CANDIDATES)
    q = q_desc.load([start + row, head * D_QK])
    own = _derive_keys(dropout, start, i, length, head)
    total, top, sums = tl.zeros([M, D_V], tl.float32), 0.0, 0.0
    if SOFTMAX:
        top, sums = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    for number in tl.range(0, (parts[0] + parts[2] - parts[1]) // N, num_stages=STAGES):
        key = _find_unmasked(number, parts[0], parts[1], visible, N)
        total, top, sums = _add_values(
            (total, top, sums), q, own, k_desc, v_desc, pairs_desc, i, row, key, head, sample,
            visible, dropout, bias, score_factor, D_QK, D_V, M, N, FAST, INLINE, PRECISION,
            CANDIDATES, SOFTMAX, MASKED=False,
        )  # fmt: skip
    for number in tl.range(0, parts[6], num_stages=MASKED_STAGES):
        key = _find_masked(number, row, parts, visible, N)
        total, top, sums = _add_values(
            (total, top, sums), q, own, k_desc, v_desc, pairs_desc, i, row, key, head, sample,
            visible, dropout, bias, score_factor, D_QK, D_V, M, N, FAST, INLINE, PRECISION,
            CANDIDATES, SOFTMAX, MASKED=True,
        )  # fmt: skip
    if SOFTMAX:
        total = total / sums[:, None]
        place = logarithms + head.to(tl.int64) * tokens + start + i
        tl.store(place, top + tl.log2(sums), mask=i < length)
    else:
        total *= inverse_scale
    _store(out, HEADS * D_V, start, i, length, head * D_V, total, D_V)


@triton.jit(do_not_specialize=["tokens"])
def output_products_kernel(
    grad, out, along, tokens, HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr
):
    """along [HEADS, tokens]: the products of outputs and their gradients, which a softmax subtracts
    from the gradient of each of its weights."""
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    place = row[:, None] * (HEADS * D) + head * D + tl.arange(0, D)[None, :]
    there = (row < tokens)[:, None]
    products = tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
    products *= tl.load(out + place, mask=there, other=0.0).to(tl.float32)
    tl.store(along + head.to(tl.int64) * tokens + row, tl.sum(products, 1), mask=row < tokens)


@triton.jit
def _split_queries(
    tiles, row, length, history, visible, HEADS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Keys [row, row + N) are seen by `diagonal` tiles of queries from `row` with a mask, by the
    queries [first, last) without one, and by `rest` tiles from `last` with one."""
    least = tl.load(tiles + tl.program_id(0) // HEADS * TILE_COLUMNS + TILE_FIRST)
    diagonal = tl.where(row < least, 0, tl.cdiv(tl.minimum(N, length - row), M))
    first = tl.maximum(row + N, least)
    last = first + tl.maximum(length - first, 0) // M * M
    rest = tl.cdiv(tl.maximum(length - last, 0), M)
    if CANDIDATES:
        mixed = row + N > history  # candidates among these keys: no query sees all of them
        last = tl.where(mixed, first, last)
        rest = tl.where(
            mixed, tl.where(row < history, tl.cdiv(tl.maximum(length - first, 0), M), 0), rest
        )
    if visible[1] is not None:
        keys, reach = visible
        # queries from `stop` on see none of these keys, those from `near` on not all of them
        stop = tl.minimum(row + N - 1 + reach, length)
        near = first + tl.maximum(row + reach - first, 0) // M * M
        if CANDIDATES:  # candidates have the position after the history
            stop = tl.where(history - (row + N - 1) < reach, length, stop)
            near = tl.where(history - row < reach, length, near)
        stop = tl.where(row < keys, length, stop)
        near = tl.where(row + N <= keys, length, near)
        last = tl.minimum(last, tl.maximum(near, first))
        rest = tl.where(row < history, tl.cdiv(tl.maximum(stop - last, 0), M), 0)
    return diagonal, first, last, rest


@triton.jit
def _load_of_queries(values, tokens, head, start, i, length, SOFTMAX: tl.constexpr):
    """[M]: of [HEADS, tokens], for the queries i of a softmax."""
    found = 0.0
    if SOFTMAX:
        place = values + head.to(tl.int64) * tokens + start + i
        found = tl.load(place, mask=i < length, other=0.0)
    return found


@triton.jit
def _add_key_gradients(
    total_k, total_v, k, v, q_desc, grad_desc, pairs_desc, logarithms, along, tokens, j, row, query,
    head, sample, visible, dropout, bias, factor,
    D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FAST: tl.constexpr,
    INLINE: tl.constexpr, PRECISION: tl.constexpr, CANDIDATES: tl.constexpr, SOFTMAX: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """total_k [N, D_QK] and total_v [N, D_V] plus the contributions of the queries
    [query, query + M) to the keys j.

    Without a mask the product with the values starts before tanh and hides it. With a mask it comes
    as late as possible to save registers.
    """
    start, length, history, _ = sample
    i = query + tl.arange(0, M)
    q = q_desc.load([start + query, head * D_QK])
    if MASKED:
        grad = grad_desc.load([start + query, head * D_V])
        q = tl.where((i < length)[:, None], q, 0.0)
        grad = tl.where((i < length)[:, None], grad, 0.0)
        seen = _allowed(i[None, :], j[:, None], length, history, visible, CANDIDATES)
    products = tl.dot(k, q.T, input_precision=PRECISION)  # [N, M]
    if SOFTMAX:
        of_query = _load_of_queries(logarithms, tokens, head, start, i, length, SOFTMAX)
        half = products * factor - of_query[None, :]
    else:
        half = _half_scores(
            products, factor, i[None, :], j[:, None], query, row, sample, bias, pairs_desc, INLINE,
            TURNED=True,
        )  # fmt: skip
    if not MASKED:
        grad = grad_desc.load([start + query, head * D_V])
        if KEYS:
            change = tl.dot(v, grad.T, input_precision=PRECISION)
    own = _derive_keys(dropout, start, i, length, head)
    if SOFTMAX:
        t = tl.exp2(half)
        weights = _drop(t, own, row, dropout, M, N, TURNED=True)
    else:
        t = _tanh(half, FAST)
        weights = half * t + half
    if VALUES:
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
        total_v = tl.dot(weights.to(grad.dtype), grad, total_v, input_precision=PRECISION)
    if KEYS:
        if MASKED:
            change = tl.dot(v, grad.T, input_precision=PRECISION)
        if SOFTMAX:
            change = _drop(change, own, row, dropout, M, N, TURNED=True)
            change -= _load_of_queries(along, tokens, head, start, i, length, SOFTMAX)[None, :]
            change = change * t
        else:
            change = change * _double_slope(half, t)
        if MASKED:
            change = tl.where(seen, change, 0.0)
        total_k = tl.dot(change.to(q.dtype), q, total_k, input_precision=PRECISION)
    return total_k, total_v


@triton.jit(do_not_specialize=VARYING)
def backward_kv_kernel(
    q_desc, k_desc, v_desc, grad_desc, pairs_desc, logarithms, along, grad_k, grad_v, tiles,
    tokens, first, last, keys, layer, threshold, share,
    position_bias, farthest, time_bias, edges, times, buckets, score_factor, factor, inverse_scale,
    HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FAST: tl.constexpr, INLINE: tl.constexpr, PRECISION: tl.constexpr, CANDIDATES: tl.constexpr,
    SOFTMAX: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr,
    MASKED_STAGES: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,  # gradient strides
):  # fmt: skip
    """Gradients of the keys [row, row + N) and of their values, summed over the queries: tiles with
    a mask first, then the others, each in order. Wide heads have registers for the sums of only one
    of the two: KEYS or VALUES is then not set."""
    head, sample, row = _load_tile(tiles, HEADS)
    start, length, history, _ = sample
    visible, dropout = (first, last), (keys, layer, threshold, share)
    bias = (position_bias, farthest, time_bias, edges, times, buckets)
    j = row + tl.arange(0, N)
    diagonal, begin, end, rest = _split_queries(
        tiles, row, length, history, visible, HEADS, M, N, CANDIDATES
    )
    k = k_desc.load([start + row, head * D_QK])
    v = k
    if KEYS:
        v = v_desc.load([start + row, head * D_V])
    total_k = tl.zeros([N, D_QK], tl.float32)
    total_v = tl.zeros([N, D_V], tl.float32)
    for number in tl.range(0, diagonal + rest, num_stages=MASKED_STAGES):
        query = tl.where(number < diagonal, row + number * M, end + (number - diagonal) * M)
        total_k, total_v = _add_key_gradients(
            total_k, total_v, k, v, q_desc, grad_desc, pairs_desc, logarithms, along, tokens, j,
            row, query, head, sample, visible, dropout, bias, score_factor, D_QK, D_V, M, N, FAST,
            INLINE, PRECISION, CANDIDATES, SOFTMAX, KEYS, VALUES, MASKED=True,
        )  # fmt: skip
    for query in tl.range(begin, end, M, num_stages=STAGES):
        total_k, total_v = _add_key_gradients(
            total_k, total_v, k, v, q_desc, grad_desc, pairs_desc, logarithms, along, tokens, j,
            row, query, head, sample, visible, dropout, bias, score_factor, D_QK, D_V, M, N, FAST,
            INLINE, PRECISION, CANDIDATES, SOFTMAX, KEYS, VALUES, MASKED=False,
        )  # fmt: skip
    if KEYS:
        _store(grad_k, STRIDE_K, start, j, length, head * D_QK, total_k * factor, D_QK)
    if VALUES:
        _store(grad_v, STRIDE_V, start, j, length, head * D_V, total_v * inverse_scale, D_V)


@triton.jit
def _add_query_gradients(
    total, buckets_seen, q, grad, own, of_query, along, k_desc, v_desc, pairs_desc, distances,
    by_self, i, row, key, head, sample, visible, dropout, bias, factor,
    later, tokens,
    HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BUCKETS: tl.constexpr, FAST: tl.constexpr, INLINE: tl.constexpr, PRECISION: tl.constexpr,
    CANDIDATES: tl.constexpr, SOFTMAX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """total [M, D_QK] plus the contributions of the keys [key, key + N) to the queries i; and the
    sums of the gradients of their scores by distance and by bucket, if there is room for them."""
    start, length, history, pairs = sample
    k = k_desc.load([start + key, head * D_QK])
    if MASKED:
        k = tl.where((key + tl.arange(0, N) < length)[:, None], k, 0.0)
    products = tl.dot(q, k.T, input_precision=PRECISION)
    j = key + tl.arange(0, N)
    if SOFTMAX:
        half = products * factor - of_query[:, None]
    else:
        half = _half_scores(
            products, factor, i[:, None], j[None, :], row, key, sample, bias, pairs_desc, INLINE,
            TURNED=False,
        )  # fmt: skip
    change = tl.dot(grad, v_desc.load([start + key, head * D_V]).T, input_precision=PRECISION)
    if SOFTMAX:
        change = _drop(change, own, key, dropout, M, N, TURNED=False)
        change = (change - along[:, None]) * tl.exp2(half)
    else:
        t = _tanh(half, FAST)
        change = change * _double_slope(half, t)
    if MASKED:
        seen = _allowed(i[:, None], j[None, :], length, history, visible, CANDIDATES)
        change = tl.where(seen, change, 0.0)
    narrow = change.to(k.dtype)
    if distances is not None:
        _store_distances(
            narrow, distances, by_self, i, j, row, key, head, sample, tokens, M, N, CANDIDATES,
            MASKED,
        )  # fmt: skip
    if BUCKETS > 0:
        buckets_seen = _add_to_buckets(
            buckets_seen, tl.where((i < length)[:, None], change, 0.0), bias, start, length, later,
            j, BUCKETS,
        )  # fmt: skip
    return tl.dot(narrow, k, total, input_precision=PRECISION), buckets_seen


@triton.jit(do_not_specialize=[*VARYING, "plane"])
def backward_q_kernel(
    q_desc, k_desc, v_desc, grad_desc, pairs_desc, logarithms, along,
    by_distance, by_self, by_bucket, plane, grad_q, tiles,
    tokens, first, last, keys, layer, threshold, share,
    position_bias, farthest, time_bias, edges, times, buckets, score_factor, factor,
    HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BUCKETS: tl.constexpr, FAST: tl.constexpr, INLINE: tl.constexpr, PRECISION: tl.constexpr,
    CANDIDATES: tl.constexpr, SOFTMAX: tl.constexpr, STAGES: tl.constexpr,
    MASKED_STAGES: tl.constexpr, STRIDE: tl.constexpr,  # stride of the gradient
):  # fmt: skip
    """Gradients of the queries [row, row + M), summed over the keys in their order. Rows past a
    sample's end have arbitrary values.

    Sums the gradients of the scores for those of the biases: `by_distance` has `plane` numbers for
    each head (`_store_distances` writes a tile's part of them), `by_bucket` a row of BUCKETS for
    each program.
    """
    head, sample, row = _load_tile(tiles, HEADS)
    start, length, history, _ = sample
    visible, dropout = (first, last), (keys, layer, threshold, share)
    bias = (position_bias, farthest, time_bias, edges, times, buckets)
    i = row + tl.arange(0, M)
    parts = _split_keys(row, length, history, visible, M, N, CANDIDATES)
    q = q_desc.load([start + row, head * D_QK])
    grad = grad_desc.load([start + row, head * D_V])
    own = _derive_keys(dropout, start, i, length, head)
    of_query = _load_of_queries(logarithms, tokens, head, start, i, length, SOFTMAX)
    of_output = _load_of_queries(along, tokens, head, start, i, length, SOFTMAX)
    distances = None
    if by_distance is not None:
        slot = tl.load(tiles + tl.program_id(0) // HEADS * TILE_COLUMNS + TILE_SUMS).to(tl.int64)
        distances = by_distance + head.to(tl.int64) * plane + slot * (M // N + 1 + CANDIDATES)
    later = 0
    state = (0, 0.0, 0.0, 0.0)
    if BUCKETS > 0:
        later = tl.load(times + start + tl.minimum(i, length - 1))
        state = (-2, tl.zeros([M], tl.float32), tl.zeros([M], tl.float32),
                 tl.zeros([BUCKETS], tl.float32))  # fmt: skip
    total = tl.zeros([M, D_QK], tl.float32)
    for number in tl.range(0, (parts[0] + parts[2] - parts[1]) // N, num_stages=STAGES):
        key = _find_unmasked(number, parts[0], parts[1], visible, N)
        total, state = _add_query_gradients(
            total, state, q, grad, own, of_query, of_output, k_desc, v_desc, pairs_desc,
            distances, by_self, i, row, key, head, sample, visible,
            dropout, bias, score_factor, later, tokens, HEADS, D_QK, D_V, M, N, BUCKETS, FAST,
            INLINE, PRECISION, CANDIDATES, SOFTMAX, MASKED=False,
        )  # fmt: skip
    for number in tl.range(0, parts[6], num_stages=MASKED_STAGES):
        key = _find_masked(number, row, parts, visible, N)
        total, state = _add_query_gradients(
            total, state, q, grad, own, of_query, of_output, k_desc, v_desc, pairs_desc,
            distances, by_self, i, row, key, head, sample, visible,
            dropout, bias, score_factor, later, tokens, HEADS, D_QK, D_V, M, N, BUCKETS, FAST,
            INLINE, PRECISION, CANDIDATES, SOFTMAX, MASKED=True,
        )  # fmt: skip
    if BUCKETS > 0:
        histogram = _finish_buckets(state, BUCKETS)
        place = by_bucket + tl.program_id(0).to(tl.int64) * BUCKETS + tl.arange(0, BUCKETS)
        tl.store(place, histogram)
    _store(grad_q, STRIDE, start, i, length, head * D_QK, total * factor, D_QK)
