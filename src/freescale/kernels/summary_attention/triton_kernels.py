"""The Triton kernels of `summary_attention.triton`: forward, and the gradients of summaries and
queries.

One program works on one tile of one head: rows in forward and for the queries' gradient, summaries
for their own gradient. It visits only the tiles that see its tile or that its tile sees. The mask
is arithmetic on row numbers. SiLU and descriptors are as in `attention.triton_kernels`: tiles at a
sample's end read the next sample's rows, which are zeroed before a product.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.plan_columns import SummaryTileColumn
from freescale.kernels.attention.triton_kernels import _double_slope, _store, _tanh

# Columns of a table of tiles: kernels read only globals that are constexpr.
START = tl.constexpr(SummaryTileColumn.START.value)
LENGTH = tl.constexpr(SummaryTileColumn.LENGTH.value)
FIRST = tl.constexpr(SummaryTileColumn.FIRST.value)
CLOSED = tl.constexpr(SummaryTileColumn.CLOSED.value)
KNOWN = tl.constexpr(SummaryTileColumn.KNOWN.value)
PLACE = tl.constexpr(SummaryTileColumn.PLACE.value)
COLUMNS = tl.constexpr(len(SummaryTileColumn))


@triton.jit
def _load_tile(tiles, HEADS: tl.constexpr):
    """The program's head, and the columns of its tile."""
    program = tl.program_id(0)
    tile = tiles + program // HEADS * COLUMNS
    start, length = tl.load(tile + START), tl.load(tile + LENGTH)
    first, closed = tl.load(tile + FIRST), tl.load(tile + CLOSED)
    known, place = tl.load(tile + KNOWN), tl.load(tile + PLACE)
    return program % HEADS, start, length, first, closed, known, place


@triton.jit
def _count_seen(i, closed, known, PERIOD: tl.constexpr, TOKENS: tl.constexpr):
    """The number of summaries that row i of its sample sees."""
    return (known + tl.minimum(i // PERIOD, closed)) * TOKENS


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out, tiles, half_alpha, inverse_scale,
    HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PERIOD: tl.constexpr, TOKENS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    head, start, length, first, closed, known, row = _load_tile(tiles, HEADS)
    i = row + tl.arange(0, M)
    columns = tl.arange(0, N)
    seen = _count_seen(i, closed, known, PERIOD, TOKENS)
    most = _count_seen(tl.minimum(row + M, length) - 1, closed, known, PERIOD, TOKENS)
    q = q_desc.load([start + row, head * D_QK])
    total = tl.zeros([M, D_V], tl.float32)
    for key in tl.range(0, most, N, num_stages=STAGES):
        j = key + columns
        k = k_desc.load([first + key, head * D_QK])
        half = tl.dot(q, k.T, input_precision=PRECISION) * half_alpha
        weights = half * _tanh(half, FAST) + half
        weights = tl.where(j[None, :] < seen[:, None], weights, 0.0)
        v = v_desc.load([first + key, head * D_V])
        v = tl.where((j < most)[:, None], v, 0.0)
        total = tl.dot(weights.to(v.dtype), v, total, input_precision=PRECISION)
    _store(out, HEADS * D_V, start, i, length, head * D_V, total * inverse_scale, D_V)


@triton.jit
def backward_kv_kernel(
    q_desc, k_desc, v_desc, grad_desc, grad_k, grad_v, tiles, half_alpha, factor, inverse_scale,
    HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PERIOD: tl.constexpr, TOKENS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the summaries [row, row + N), summed over the rows that see any of them, in
    their order."""
    head, start, length, first, closed, known, row = _load_tile(tiles, HEADS)
    j = row + tl.arange(0, N)
    rows = tl.arange(0, M)
    count = (known + closed) * TOKENS
    k = k_desc.load([first + row, head * D_QK])
    v = v_desc.load([first + row, head * D_V])
    total_k = tl.zeros([N, D_QK], tl.float32)
    total_v = tl.zeros([N, D_V], tl.float32)
    # the first row that sees summary `row`
    earliest = tl.maximum(row // TOKENS + 1 - known, 0) * PERIOD
    for query in tl.range(earliest, length, M, num_stages=STAGES):
        i = query + rows
        q = q_desc.load([start + query, head * D_QK])
        grad = grad_desc.load([start + query, head * D_V])
        q = tl.where((i < length)[:, None], q, 0.0)
        grad = tl.where((i < length)[:, None], grad, 0.0)
        seen = j[:, None] < _count_seen(i, closed, known, PERIOD, TOKENS)[None, :]
        seen = seen & (i < length)[None, :]
        half = tl.dot(k, q.T, input_precision=PRECISION) * half_alpha  # [N, M]
        t = _tanh(half, FAST)
        weights = tl.where(seen, half * t + half, 0.0)
        total_v = tl.dot(weights.to(grad.dtype), grad, total_v, input_precision=PRECISION)
        change = tl.dot(v, grad.T, input_precision=PRECISION)
        change = tl.where(seen, change * _double_slope(half, t), 0.0).to(q.dtype)
        total_k = tl.dot(change, q, total_k, input_precision=PRECISION)
    _store(grad_k, HEADS * D_QK, first, j, count, head * D_QK, total_k * factor, D_QK)
    _store(grad_v, HEADS * D_V, first, j, count, head * D_V, total_v * inverse_scale, D_V)


@triton.jit
def backward_q_kernel(
    q_desc, k_desc, v_desc, grad_desc, grad_q, tiles, half_alpha, factor,
    HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PERIOD: tl.constexpr, TOKENS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries [row, row + M), summed over the summaries in their order."""
    head, start, length, first, closed, known, row = _load_tile(tiles, HEADS)
    i = row + tl.arange(0, M)
    columns = tl.arange(0, N)
    seen = _count_seen(i, closed, known, PERIOD, TOKENS)
    most = _count_seen(tl.minimum(row + M, length) - 1, closed, known, PERIOD, TOKENS)
    q = q_desc.load([start + row, head * D_QK])
    grad = grad_desc.load([start + row, head * D_V])
    total = tl.zeros([M, D_QK], tl.float32)
    for key in tl.range(0, most, N, num_stages=STAGES):
        j = key + columns
        k = k_desc.load([first + key, head * D_QK])
        k = tl.where((j < most)[:, None], k, 0.0)
        half = tl.dot(q, k.T, input_precision=PRECISION) * half_alpha
        change = tl.dot(grad, v_desc.load([first + key, head * D_V]).T, input_precision=PRECISION)
        change = change * _double_slope(half, _tanh(half, FAST))
        change = tl.where(j[None, :] < seen[:, None], change, 0.0).to(k.dtype)
        total = tl.dot(change, k, total, input_precision=PRECISION)
    _store(grad_q, HEADS * D_QK, start, i, length, head * D_QK, total * factor, D_QK)
