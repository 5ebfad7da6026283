"""The Triton kernels of `attention.triton`: forward and backward.

One program works on one tile of one head: queries in forward, queries or keys in backward. Tiles
without a mask run in a separate loop with the same body. TMA descriptors span the whole batch, so a
tile at a sample's end also reads the next sample's tokens: the mask drops their scores, and their
rows are zeroed before a product (0 * inf is not 0).

SiLU is computed from h = score / 2 and t = tanh(h), with one instruction of the special function
unit instead of two:
    SiLU(score) = h * (1 + t)        2 * SiLU'(score) = (1 + t) * (1 + h * (1 - t))
The factor 1/2 of the slope, alpha and 1 / scale_length are applied once, to the finished sums.

Backward takes seven products instead of five: the kernel for keys and the one for queries both
compute the scores and their gradients. A single kernel that adds to the queries' gradient in a
fixed order is half as fast (223 TFLOP/s against 444 for heads of 128): its programs wait for their
turns. In wide heads products cost more than memory: there the kernel for queries stores the weights
and the gradients of the scores, and the gradients of keys and values are two plain products.

The bias of a score is read from a table of all pairs or computed here. `triton_bias_kernels` has
the kernel that fills the table and those for the gradients of the biases.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.plan_columns import PAIR_KEYS, PAIR_QUERIES, TileColumn

BUCKETS_PER_OCTAVE = tl.constexpr(0.6931471805599453 / 0.301)
ROWS_OF_PAIRS = tl.constexpr(PAIR_QUERIES)
COLUMNS_OF_PAIRS = tl.constexpr(PAIR_KEYS)

# Columns of the plan's tables: kernels read only globals that are constexpr.
TILE_START = tl.constexpr(TileColumn.START.value)
TILE_LENGTH = tl.constexpr(TileColumn.LENGTH.value)
TILE_HISTORY = tl.constexpr(TileColumn.HISTORY.value)
TILE_ROW = tl.constexpr(TileColumn.ROW.value)
TILE_PAIRS = tl.constexpr(TileColumn.PAIRS.value)
TILE_FIRST = tl.constexpr(TileColumn.FIRST.value)
TILE_COLUMNS = tl.constexpr(len(TileColumn))


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _allowed(i, j, length, history, CANDIDATES: tl.constexpr):
    """Whether query i sees key j. Rows past the sample's end see nothing."""
    seen = (j <= i) & (i < length)
    if CANDIDATES:
        seen = seen & ((j < history) | (j == i))
    return seen


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
def _find_stored(pairs, query, key, head, HEADS: tl.constexpr):
    """Row and column in a table of stored scores for queries from `query` and keys from `key` of
    one head. Its blocks are square: two blocks of pair biases side by side."""
    above, before = query // ROWS_OF_PAIRS, key // ROWS_OF_PAIRS
    block = pairs // 2 + above * (above + 1) // 2 + before
    row = (block * HEADS + head - above) * ROWS_OF_PAIRS + query
    return row, key - before * ROWS_OF_PAIRS


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
def _split_keys(row, length, history, M: tl.constexpr, N: tl.constexpr, CANDIDATES: tl.constexpr):
    """Queries [row, row + M) see the keys [0, full) without a mask, then `edge` tiles from `full`
    and the diagonal with one. Returns full, edge and the number of tiles with a mask."""
    full = row
    edge = 0
    if CANDIDATES:
        full = tl.minimum(row, history) // N * N
        # else the diagonal starts at full
        edge = tl.where(row > full, tl.cdiv(history - full, N), 0)
    return full, edge, edge + tl.cdiv(tl.minimum(M, length - row), N)


@triton.jit
def _add_values(
    total, q, k_desc, v_desc, pairs_desc, i, row, key, head, sample, bias, half_alpha,
    D_QK: tl.constexpr, D_V: tl.constexpr, N: tl.constexpr, FAST: tl.constexpr,
    INLINE: tl.constexpr, PRECISION: tl.constexpr, CANDIDATES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """total [M, D_V] plus the values of the keys [key, key + N), weighted for the queries i."""
    start, length, history, _ = sample
    k = k_desc.load([start + key, head * D_QK])
    products = tl.dot(q, k.T, input_precision=PRECISION)
    j = key + tl.arange(0, N)
    half = _half_scores(
        products, half_alpha, i[:, None], j[None, :], row, key, sample, bias, pairs_desc, INLINE,
        TURNED=False,
    )  # fmt: skip
    weights = half * _tanh(half, FAST) + half
    if MASKED:
        weights = tl.where(
            _allowed(i[:, None], j[None, :], length, history, CANDIDATES), weights, 0.0
        )
    v = v_desc.load([start + key, head * D_V])
    if MASKED:
        v = tl.where((j < length)[:, None], v, 0.0)
    return tl.dot(weights.to(v.dtype), v, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["farthest", "buckets"])
def forward_kernel(
    q_desc, k_desc, v_desc, pairs_desc, out, tiles,
    position_bias, farthest, time_bias, edges, times, buckets, half_alpha, inverse_scale,
    HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FAST: tl.constexpr, INLINE: tl.constexpr, PRECISION: tl.constexpr, CANDIDATES: tl.constexpr,
    STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    """The output of the queries [row, row + M), summed over the keys in their order."""
    head, sample, row = _load_tile(tiles, HEADS)
    start, length, history, _ = sample
    bias = (position_bias, farthest, time_bias, edges, times, buckets)
    i = row + tl.arange(0, M)
    full, edge, masked = _split_keys(row, length, history, M, N, CANDIDATES)
    q = q_desc.load([start + row, head * D_QK])
    total = tl.zeros([M, D_V], tl.float32)
    for key in tl.range(0, full, N, num_stages=STAGES):
        total = _add_values(
            total, q, k_desc, v_desc, pairs_desc, i, row, key, head, sample, bias, half_alpha,
            D_QK, D_V, N, FAST, INLINE, PRECISION, CANDIDATES, MASKED=False,
        )  # fmt: skip
    for number in tl.range(0, masked, num_stages=MASKED_STAGES):
        key = tl.where(number < edge, full + number * N, row + (number - edge) * N)
        total = _add_values(
            total, q, k_desc, v_desc, pairs_desc, i, row, key, head, sample, bias, half_alpha,
            D_QK, D_V, N, FAST, INLINE, PRECISION, CANDIDATES, MASKED=True,
        )  # fmt: skip
    _store(out, HEADS * D_V, start, i, length, head * D_V, total * inverse_scale, D_V)


@triton.jit
def _split_queries(
    tiles, row, length, history, HEADS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
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
    return diagonal, first, last, rest


@triton.jit
def _add_key_gradients(
    total_k, total_v, k, v, q_desc, grad_desc, pairs_desc, j, row, query, head, sample, bias,
    half_alpha,
    D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, FAST: tl.constexpr,
    INLINE: tl.constexpr, PRECISION: tl.constexpr, CANDIDATES: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, MASKED: tl.constexpr,
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
        seen = _allowed(i[None, :], j[:, None], length, history, CANDIDATES)
    products = tl.dot(k, q.T, input_precision=PRECISION)  # [N, M]
    half = _half_scores(
        products, half_alpha, i[None, :], j[:, None], query, row, sample, bias, pairs_desc, INLINE,
        TURNED=True,
    )  # fmt: skip
    if not MASKED:
        grad = grad_desc.load([start + query, head * D_V])
        if KEYS:
            change = tl.dot(v, grad.T, input_precision=PRECISION)
    t = _tanh(half, FAST)
    if VALUES:
        weights = half * t + half
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
        total_v = tl.dot(weights.to(grad.dtype), grad, total_v, input_precision=PRECISION)
    if KEYS:
        if MASKED:
            change = tl.dot(v, grad.T, input_precision=PRECISION)
        change = change * _double_slope(half, t)
        if MASKED:
            change = tl.where(seen, change, 0.0)
        total_k = tl.dot(change.to(q.dtype), q, total_k, input_precision=PRECISION)
    return total_k, total_v


@triton.jit(do_not_specialize=["farthest", "buckets"])
def backward_kv_kernel(
    q_desc, k_desc, v_desc, grad_desc, pairs_desc, grad_k, grad_v, tiles,
    position_bias, farthest, time_bias, edges, times, buckets, half_alpha, factor, inverse_scale,
    HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FAST: tl.constexpr, INLINE: tl.constexpr, PRECISION: tl.constexpr, CANDIDATES: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr,
    STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,  # of the gradients
):  # fmt: skip
    """Gradients of the keys [row, row + N) and of their values, summed over the queries: tiles with
    a mask first, then the others, each in order. Wide heads have registers for the sums of only one
    of the two: KEYS or VALUES is then not set."""
    head, sample, row = _load_tile(tiles, HEADS)
    start, length, history, _ = sample
    bias = (position_bias, farthest, time_bias, edges, times, buckets)
    j = row + tl.arange(0, N)
    diagonal, first, last, rest = _split_queries(
        tiles, row, length, history, HEADS, M, N, CANDIDATES
    )
    k = k_desc.load([start + row, head * D_QK])
    v = k
    if KEYS:
        v = v_desc.load([start + row, head * D_V])
    total_k = tl.zeros([N, D_QK], tl.float32)
    total_v = tl.zeros([N, D_V], tl.float32)
    for number in tl.range(0, diagonal + rest, num_stages=MASKED_STAGES):
        query = tl.where(number < diagonal, row + number * M, last + (number - diagonal) * M)
        total_k, total_v = _add_key_gradients(
            total_k, total_v, k, v, q_desc, grad_desc, pairs_desc, j, row, query, head, sample,
            bias, half_alpha, D_QK, D_V, M, FAST, INLINE, PRECISION, CANDIDATES, KEYS, VALUES,
            MASKED=True,
        )  # fmt: skip
    for query in tl.range(first, last, M, num_stages=STAGES):
        total_k, total_v = _add_key_gradients(
            total_k, total_v, k, v, q_desc, grad_desc, pairs_desc, j, row, query, head, sample,
            bias, half_alpha, D_QK, D_V, M, FAST, INLINE, PRECISION, CANDIDATES, KEYS, VALUES,
            MASKED=False,
        )  # fmt: skip
    if KEYS:
        _store(grad_k, STRIDE_K, start, j, length, head * D_QK, total_k * factor, D_QK)
    if VALUES:
        _store(grad_v, STRIDE_V, start, j, length, head * D_V, total_v * inverse_scale, D_V)


@triton.jit
def _add_query_gradients(
    total, q, grad, k_desc, v_desc, pairs_desc, weights_desc, changes_desc, i, row, key, head,
    sample, bias, half_alpha,
    HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, N: tl.constexpr, FAST: tl.constexpr,
    INLINE: tl.constexpr, PRECISION: tl.constexpr, CANDIDATES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """total [M, D_QK] plus the contributions of the keys [key, key + N) to the queries i."""
    start, length, history, pairs = sample
    k = k_desc.load([start + key, head * D_QK])
    if MASKED:
        k = tl.where((key + tl.arange(0, N) < length)[:, None], k, 0.0)
    products = tl.dot(q, k.T, input_precision=PRECISION)
    j = key + tl.arange(0, N)
    half = _half_scores(
        products, half_alpha, i[:, None], j[None, :], row, key, sample, bias, pairs_desc, INLINE,
        TURNED=False,
    )  # fmt: skip
    change = tl.dot(grad, v_desc.load([start + key, head * D_V]).T, input_precision=PRECISION)
    t = _tanh(half, FAST)
    change = change * _double_slope(half, t)
    if MASKED:
        seen = _allowed(i[:, None], j[None, :], length, history, CANDIDATES)
        change = tl.where(seen, change, 0.0)
    narrow = change.to(k.dtype)
    at, column = _find_stored(pairs, row, key, head, HEADS)
    if weights_desc is not None:
        weights = half * t + half
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
        weights_desc.store([at, column], weights.to(k.dtype))
    if changes_desc is not None:
        changes_desc.store([at, column], narrow)
    return tl.dot(narrow, k, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["farthest", "buckets"])
def backward_q_kernel(
    q_desc, k_desc, v_desc, grad_desc, pairs_desc, weights_desc, changes_desc, grad_q, tiles,
    position_bias, farthest, time_bias, edges, times, buckets, half_alpha, factor,
    HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FAST: tl.constexpr, INLINE: tl.constexpr, PRECISION: tl.constexpr, CANDIDATES: tl.constexpr,
    STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr, STRIDE: tl.constexpr,  # of the gradient
):  # fmt: skip
    """Gradients of the queries [row, row + M), summed over the keys in their order. Stores the
    weights and the gradients of the scores of all pairs that it visits, if there are tables for
    them. Rows past a sample's end have arbitrary values."""
    head, sample, row = _load_tile(tiles, HEADS)
    start, length, history, _ = sample
    bias = (position_bias, farthest, time_bias, edges, times, buckets)
    i = row + tl.arange(0, M)
    full, edge, masked = _split_keys(row, length, history, M, N, CANDIDATES)
    q = q_desc.load([start + row, head * D_QK])
    grad = grad_desc.load([start + row, head * D_V])
    total = tl.zeros([M, D_QK], tl.float32)
    for key in tl.range(0, full, N, num_stages=STAGES):
        total = _add_query_gradients(
            total, q, grad, k_desc, v_desc, pairs_desc, weights_desc, changes_desc, i, row, key,
            head, sample, bias, half_alpha, HEADS, D_QK, D_V, N, FAST, INLINE, PRECISION,
            CANDIDATES, MASKED=False,
        )  # fmt: skip
    for number in tl.range(0, masked, num_stages=MASKED_STAGES):
        key = tl.where(number < edge, full + number * N, row + (number - edge) * N)
        total = _add_query_gradients(
            total, q, grad, k_desc, v_desc, pairs_desc, weights_desc, changes_desc, i, row, key,
            head, sample, bias, half_alpha, HEADS, D_QK, D_V, N, FAST, INLINE, PRECISION,
            CANDIDATES, MASKED=True,
        )  # fmt: skip
    _store(grad_q, STRIDE, start, i, length, head * D_QK, total * factor, D_QK)


@triton.jit
def _add_stored(
    total, stored_desc, rows_desc, j, row, query, head, sample,
    HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, CANDIDATES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """total [N, D] plus the rows of the queries [query, query + M), with stored weights for the
    keys j."""
    start, length, history, pairs = sample
    at, column = _find_stored(pairs, query, row, head, HEADS)
    stored = stored_desc.load([at, column])
    rows = rows_desc.load([start + query, head * D])
    if MASKED:
        i = query + tl.arange(0, M)
        seen = _allowed(i[:, None], j[None, :], length, history, CANDIDATES)
        stored = tl.where(seen, stored, 0.0)
        rows = tl.where((i < length)[:, None], rows, 0.0)
    return tl.dot(stored.T, rows, total)


@triton.jit
def backward_stored_kernel(
    stored_desc, rows_desc, out, tiles, factor,
    HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CANDIDATES: tl.constexpr, STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr,
    STRIDE: tl.constexpr,  # of `out`
):  # fmt: skip
    """Sums of the queries' rows for the keys [row, row + N), weighted by a stored table, in the
    order of `backward_kv_kernel`. The gradients of values are sums of the output's gradient with
    the weights, those of keys sums of the queries with the scores' gradients."""
    head, sample, row = _load_tile(tiles, HEADS)
    start, length, history, _ = sample
    j = row + tl.arange(0, N)
    diagonal, first, last, rest = _split_queries(
        tiles, row, length, history, HEADS, M, N, CANDIDATES
    )
    total = tl.zeros([N, D], tl.float32)
    for number in tl.range(0, diagonal + rest, num_stages=MASKED_STAGES):
        query = tl.where(number < diagonal, row + number * M, last + (number - diagonal) * M)
        total = _add_stored(
            total, stored_desc, rows_desc, j, row, query, head, sample, HEADS, D, M, CANDIDATES,
            MASKED=True,
        )  # fmt: skip
    for query in tl.range(first, last, M, num_stages=STAGES):
        total = _add_stored(
            total, stored_desc, rows_desc, j, row, query, head, sample, HEADS, D, M, CANDIDATES,
            MASKED=False,
        )  # fmt: skip
    _store(out, STRIDE, start, j, length, head * D, total * factor, D)
