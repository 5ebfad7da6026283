"""The Triton kernels of the attention's biases: one fills the table of pair biases, one adds the
gradients of the scores. A program works on a tile of queries."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.triton_bias_sums_kernels import (
    TILE_SUMS,
    _add_to_buckets,
    _bucket_range,
    _finish_buckets,
    _store_distances,
)
from freescale.kernels.attention.triton_kernels import (
    COLUMNS_OF_PAIRS,
    ROWS_OF_PAIRS,
    TILE_COLUMNS,
    TILE_HISTORY,
    TILE_LENGTH,
    TILE_PAIRS,
    TILE_ROW,
    TILE_START,
    _allowed,
    _distance,
    _find_masked,
    _find_pairs,
    _find_stored,
    _find_unmasked,
    _look_up,
    _split_keys,
)


@triton.jit(do_not_specialize=["farthest", "buckets", "first", "last"])
def pair_bias_kernel(
    table, tiles, position_bias, farthest, time_bias, edges, times, buckets, first, last,
    M: tl.constexpr, INLINE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Half the bias of every pair of tokens, in blocks of queries and keys: once for all heads.

    Buckets are found by comparing with their edges. A block's times bound its buckets: away from
    the diagonal these are few.
    """
    tile = tiles + tl.program_id(0) * TILE_COLUMNS
    start, length = tl.load(tile + TILE_START), tl.load(tile + TILE_LENGTH)
    history, row = tl.load(tile + TILE_HISTORY), tl.load(tile + TILE_ROW)
    pairs = tl.load(tile + TILE_PAIRS)
    i = row + tl.arange(0, M)
    columns = tl.arange(0, COLUMNS_OF_PAIRS)
    inside = tl.arange(0, M)[:, None] * COLUMNS_OF_PAIRS + columns[None, :]
    if time_bias is not None:
        later = tl.load(times + start + tl.minimum(i, length - 1))
    end = tl.minimum(row + M, length)
    blocks, skipped, head = tl.cdiv(end, COLUMNS_OF_PAIRS), 0, 0
    if last is not None:  # no query sees the keys between
        head = tl.cdiv(first, COLUMNS_OF_PAIRS)
        lowest = tl.maximum(tl.minimum(row, history) - last + 1, 0) // COLUMNS_OF_PAIRS
        skipped = tl.maximum(lowest - head, 0)
    for number in range(tl.program_id(1), blocks - skipped, SPLIT):
        key = tl.where(number < head, number, number + skipped) * COLUMNS_OF_PAIRS
        j = key + columns
        bias = tl.zeros([M, COLUMNS_OF_PAIRS], tl.float32)
        if position_bias is not None:
            bias += _look_up(
                position_bias, _distance(i[:, None], j[None, :], history, farthest), INLINE
            )
        if time_bias is not None:
            earlier = tl.load(times + start + tl.minimum(j, length - 1))
            lowest, highest = _bucket_range(later, earlier, buckets)
            elapsed = later[:, None] - earlier[None, :]
            of_time = tl.zeros_like(bias) + tl.load(time_bias + lowest)
            for bucket in range(lowest + 1, highest + 1):
                entered = elapsed >= tl.load(edges + bucket)
                of_time = tl.where(entered, tl.load(time_bias + bucket), of_time)
            bias += of_time
        offset = _find_pairs(pairs, row, key)[0].to(tl.int64) * COLUMNS_OF_PAIRS
        tl.store(table + offset + inside, (0.5 * bias).to(table.dtype.element_ty))


@triton.jit
def _add_heads(
    changes, state, distances, by_self, i, row, key, sample, visible, bias, later,
    HEADS: tl.constexpr, B: tl.constexpr, BUCKETS: tl.constexpr, CANDIDATES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of the scores of a tile over the heads, then by distance and bucket."""
    start, length, history, pairs = sample
    j = key + tl.arange(0, B)
    top, column = _find_stored(pairs, row, key, 0, HEADS)
    there = (top + tl.arange(0, B)).to(tl.int64)[:, None] * ROWS_OF_PAIRS
    there = changes + there + column + tl.arange(0, B)[None, :]
    change = tl.load(there).to(tl.float32)
    for head in tl.static_range(1, HEADS):
        change += tl.load(there + head * ROWS_OF_PAIRS * ROWS_OF_PAIRS).to(tl.float32)
    seen = (i < length)[:, None]
    if MASKED:
        seen = _allowed(i[:, None], j[None, :], length, history, visible, CANDIDATES)
    change = tl.where(seen, change, 0.0)  # others may be unwritten
    if distances is not None:
        _store_distances(
            change, distances, by_self, i, j, row, key, sample, B, B, CANDIDATES, MASKED
        )
    if BUCKETS > 0:
        state = _add_to_buckets(state, change, bias, start, length, later, j, BUCKETS)
    return state


@triton.jit(do_not_specialize=["first", "last", "buckets"])
def sum_changes_kernel(
    changes, tiles, by_distance, by_self, by_bucket, first, last, edges, times, buckets,
    HEADS: tl.constexpr, B: tl.constexpr, BUCKETS: tl.constexpr, CANDIDATES: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """As `backward_q_kernel` adds the gradients of the scores, from their table: over the heads
    first, which share the biases. The programs of a tile of queries share its keys."""
    tile = tiles + tl.program_id(0) * TILE_COLUMNS
    start, length = tl.load(tile + TILE_START), tl.load(tile + TILE_LENGTH)
    history, row = tl.load(tile + TILE_HISTORY), tl.load(tile + TILE_ROW)
    sample, visible = (start, length, history, tl.load(tile + TILE_PAIRS)), (first, last)
    bias = (None, None, None, edges, times, buckets)
    i = row + tl.arange(0, B)
    distances, later, state = None, 0, (0, 0.0, 0.0, 0.0)
    if by_distance is not None:
        slot = tl.load(tile + TILE_SUMS).to(tl.int64)
        distances = by_distance + slot * (2 + CANDIDATES)
    if BUCKETS > 0:
        later = tl.load(times + start + tl.minimum(i, length - 1))
        rows = tl.zeros([B], tl.float32)
        state = (-2, rows, rows, tl.zeros([BUCKETS], tl.float32))
    parts = _split_keys(row, length, history, visible, B, B, CANDIDATES)
    for number in range(tl.program_id(1), (parts[0] + parts[2] - parts[1]) // B, SPLIT):
        key = _find_unmasked(number, parts[0], parts[1], visible, B)
        state = _add_heads(
            changes, state, distances, by_self, i, row, key, sample, visible, bias, later,
            HEADS, B, BUCKETS, CANDIDATES, MASKED=False,
        )  # fmt: skip
    for number in range(tl.program_id(1), parts[6], SPLIT):
        key = _find_masked(number, row, parts, visible, B)
        state = _add_heads(
            changes, state, distances, by_self, i, row, key, sample, visible, bias, later,
            HEADS, B, BUCKETS, CANDIDATES, MASKED=True,
        )  # fmt: skip
    if BUCKETS > 0:
        program = tl.program_id(0).to(tl.int64) * SPLIT + tl.program_id(1)
        tl.store(
            by_bucket + program * BUCKETS + tl.arange(0, BUCKETS), _finish_buckets(state, BUCKETS)
        )
