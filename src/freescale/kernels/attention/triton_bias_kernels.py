"""The Triton kernels of the attention's biases by position and time: the table of pair biases, and
the gradients of the biases.

One program of the table's kernel works on one tile of queries. The gradients take two steps: a
program visits the tiles of one walk and writes partial sums, which are then added, by distance in a
kernel and by bucket in torch. Scores, masks and descriptors are those of `triton_kernels`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.plan_columns import PieceColumn, WalkColumn
from freescale.kernels.attention.triton_kernels import (
    BUCKETS_PER_OCTAVE,
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
    _double_slope,
    _find_pairs,
    _find_stored,
    _half_scores,
    _look_up,
    _tanh,
)

# Columns of the plan's tables: kernels read only globals that are constexpr.
WALK_START = tl.constexpr(WalkColumn.START.value)
WALK_LENGTH = tl.constexpr(WalkColumn.LENGTH.value)
WALK_HISTORY = tl.constexpr(WalkColumn.HISTORY.value)
WALK_ROW = tl.constexpr(WalkColumn.ROW.value)
WALK_SLOT = tl.constexpr(WalkColumn.SLOT.value)
WALK_KEY = tl.constexpr(WalkColumn.KEY.value)
WALK_STOP = tl.constexpr(WalkColumn.STOP.value)
WALK_PAIRS = tl.constexpr(WalkColumn.PAIRS.value)
WALK_FIRST = tl.constexpr(WalkColumn.FIRST.value)
WALK_COLUMNS = tl.constexpr(len(WalkColumn))
PIECE_SLOT = tl.constexpr(PieceColumn.SLOT.value)
PIECE_TILES = tl.constexpr(PieceColumn.TILES.value)
PIECE_START = tl.constexpr(PieceColumn.START.value)
PIECE_HISTORY = tl.constexpr(PieceColumn.HISTORY.value)
PIECE_COLUMNS = tl.constexpr(len(PieceColumn))


@triton.jit
def _bucket_range(later, earlier, buckets):
    """The lowest and highest bucket that pairs of these times can have."""
    shortest = tl.maximum(tl.min(later, 0) - tl.max(earlier, 0), 1).to(tl.float32)
    longest = tl.maximum(tl.max(later, 0) - tl.min(earlier, 0), 1).to(tl.float32)
    lowest = tl.maximum(tl.log2(shortest) * BUCKETS_PER_OCTAVE - 1e-3, 0.0).to(tl.int32)
    highest = (tl.log2(longest) * BUCKETS_PER_OCTAVE + 1e-3).to(tl.int32)
    return tl.minimum(lowest, buckets), tl.minimum(highest, buckets)


@triton.jit(do_not_specialize=["farthest", "buckets"])
def pair_bias_kernel(
    table, tiles, position_bias, farthest, time_bias, edges, times, buckets,
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
    for number in range(tl.program_id(1), tl.cdiv(end, COLUMNS_OF_PAIRS), SPLIT):
        key = number * COLUMNS_OF_PAIRS
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


@triton.jit(do_not_specialize=["farthest", "buckets"])
def backward_bias_kernel(
    q_desc, k_desc, v_desc, grad_desc, pairs_desc, changes_desc, walks, by_distance, by_key,
    by_self, by_bucket,
    position_bias, farthest, time_bias, edges, times, buckets, half_alpha, factor,
    HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr,
    B: tl.constexpr, BUCKETS: tl.constexpr, FAST: tl.constexpr, INLINE: tl.constexpr,
    PRECISION: tl.constexpr, CANDIDATES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial sums of the biases' gradients, without atomics. All heads share the biases. Reads the
    gradients of the scores from the table of `changes_desc`, or recomputes them without it.

    Distances repeat along diagonals, so a program walks the tiles whose queries are `row` behind
    their keys [key, stop) and adds them element by element, for the queries of the history.
    Candidates share one position, so their distances repeat along columns: for them (stop is -1)
    the program walks all queries of one tile of keys.

    Along a walk the time between two tokens changes little: the sums of two adjacent buckets stay
    in registers, row by row, until a tile has other buckets.
    """
    walk = walks + tl.program_id(0) * WALK_COLUMNS
    start = tl.load(walk + WALK_START)
    length = tl.load(walk + WALK_LENGTH)
    history = tl.load(walk + WALK_HISTORY)
    row = tl.load(walk + WALK_ROW)
    slot = tl.load(walk + WALK_SLOT)
    key = tl.load(walk + WALK_KEY)
    stop = tl.load(walk + WALK_STOP)
    pairs = tl.load(walk + WALK_PAIRS)
    least = tl.load(walk + WALK_FIRST)
    sample = (start, length, history, pairs)
    of_bias = (position_bias, farthest, time_bias, edges, times, buckets)
    candidates = stop < 0
    key = tl.where(candidates, key, tl.maximum(key, least - row))  # both are multiples of B
    query, end, step = row + key, tl.minimum(row + stop, history), B
    if CANDIDATES:
        step = tl.where(candidates, 0, B)
        query = tl.where(candidates, tl.maximum(history // B * B, key), query)
        end = tl.where(
            candidates, tl.where(key < history, length, tl.minimum(key + B, length)), end
        )
    lanes = tl.arange(0, B)
    total = tl.zeros([B, B], tl.float32)
    bins = tl.arange(0, BUCKETS)
    histogram = tl.zeros([BUCKETS], tl.float32)
    current = -2  # the lower one of the two buckets
    lower = tl.zeros([B], tl.float32)
    upper = tl.zeros([B], tl.float32)
    # this loop prefetches stored scores; without them the loop over heads is pipelined
    for number in tl.range(
        0, tl.cdiv(tl.maximum(end - query, 0), B), num_stages=1 if changes_desc is None else STAGES
    ):
        i = query + number * B + lanes
        j = key + number * step + lanes
        seen = _allowed(i[:, None], j[None, :], length, history, CANDIDATES)
        if CANDIDATES:
            seen = seen & ((i >= history)[:, None] == candidates)
        change = tl.zeros([B, B], tl.float32)
        if changes_desc is not None:
            at, column = _find_stored(pairs, query + number * B, key + number * step, 0, HEADS)
            for head in tl.static_range(HEADS):
                stored = changes_desc.load([at + head * ROWS_OF_PAIRS, column])
                change += stored.to(tl.float32)
            change = tl.where(seen, change, 0.0)
        else:
            bias = _half_scores(
                change, 0.0, i[:, None], j[None, :], query + number * B, key + number * step,
                sample, of_bias, pairs_desc, INLINE, TURNED=False,
            )  # fmt: skip
            for head in tl.range(0, HEADS, num_stages=STAGES):
                q = q_desc.load([start + query + number * B, head * D_QK])
                k = k_desc.load([start + key + number * step, head * D_QK])
                scores = tl.dot(q, k.T, input_precision=PRECISION)
                half = scores * half_alpha + bias
                grad = grad_desc.load([start + query + number * B, head * D_V])
                v = v_desc.load([start + key + number * step, head * D_V])
                slope = _double_slope(half, _tanh(half, FAST))
                change += tl.where(seen, tl.dot(grad, v.T, input_precision=PRECISION) * slope, 0.0)
        total += change
        if by_bucket is not None:
            later = tl.load(times + start + tl.minimum(i, length - 1))
            earlier = tl.load(times + start + tl.minimum(j, length - 1))
            lowest, highest = _bucket_range(later, earlier, buckets)
            elapsed = later[:, None] - earlier[None, :]
            if (lowest >= current) & (highest <= current + 1):
                above = elapsed >= tl.load(edges + tl.minimum(current + 1, buckets))
                above = above & (current < buckets)
                lower += tl.sum(tl.where(above, 0.0, change), 1)
                upper += tl.sum(tl.where(above, change, 0.0), 1)
            else:
                histogram += tl.where(bins == current, tl.sum(lower, 0), 0.0)
                histogram += tl.where(bins == current + 1, tl.sum(upper, 0), 0.0)
                for bucket in range(lowest, highest + 1):
                    # in this bucket: at or above its edge, but not above the next
                    inside = (elapsed >= tl.load(edges + bucket)) | (bucket == 0)
                    above = elapsed >= tl.load(edges + tl.minimum(bucket + 1, buckets))
                    inside = inside & ((bucket == buckets) | (above == 0))
                    part = tl.sum(tl.sum(tl.where(inside, change, 0.0), 1), 0)
                    histogram += tl.where(bins == bucket, part, 0.0)
                lower = tl.zeros([B], tl.float32)
                upper = tl.zeros([B], tl.float32)
                current = lowest
    if by_bucket is not None:
        histogram += tl.where(bins == current, tl.sum(lower, 0), 0.0)
        histogram += tl.where(bins == current + 1, tl.sum(upper, 0), 0.0)
    if by_bucket is not None:
        tl.store(by_bucket + tl.program_id(0).to(tl.int64) * BUCKETS + bins, histogram * factor)
    if by_distance is not None:
        if by_key is not None and candidates:
            of_key = tl.sum(total, 0) * factor
            own = key + lanes
            tl.store(by_key + start + own, tl.where(own < history, of_key, 0.0), mask=own < length)
            tl.store(by_self + slot, tl.sum(tl.where(own < history, 0.0, of_key), 0))
        else:
            # [a, c] takes the key (a - c) mod B: at distance c if a >= c, else c - B
            turned = tl.gather(total, (lanes[:, None] - lanes[None, :] + B) % B, 1)
            inside = lanes[:, None] >= lanes[None, :]
            sums = by_distance + slot.to(tl.int64) * 2 * B + lanes
            tl.store(sums, tl.sum(tl.where(inside, turned, 0.0), 0) * factor)
            tl.store(sums + B, tl.sum(tl.where(inside, 0.0, turned), 0) * factor)


@triton.jit(do_not_specialize=["size"])
def sum_distances_kernel(
    by_distance, by_key, pieces, counts, grad_position, size, B: tl.constexpr, S: tl.constexpr
):
    """Adds the partial sums of B distances over the pieces, in a fixed order."""
    block = tl.program_id(0)
    lanes = tl.arange(0, B)
    distance = block * B + lanes
    total = tl.zeros([B], tl.float32)
    for first in range(0, tl.load(counts + block), S):  # pieces with more tiles
        number = first + tl.arange(0, S)
        present = number < tl.load(counts + block)
        piece = pieces + number * PIECE_COLUMNS
        slot = tl.load(piece + PIECE_SLOT, mask=present, other=0).to(tl.int64) + block
        tiles = tl.load(piece + PIECE_TILES, mask=present, other=0)
        offsets = slot[:, None] * 2 * B + lanes[None, :]
        total += tl.sum(tl.load(by_distance + offsets, mask=(block < tiles)[:, None], other=0.0), 0)
        total += tl.sum(
            tl.load(by_distance + offsets + 3 * B, mask=(block + 1 < tiles)[:, None], other=0.0), 0
        )
        if by_key is not None:
            start = tl.load(piece + PIECE_START, mask=present, other=0)
            history = tl.load(piece + PIECE_HISTORY, mask=present, other=0)
            key = history[:, None] - distance[None, :]
            total += tl.sum(
                tl.load(
                    by_key + start[:, None] + key,
                    mask=(key >= 0) & (key < history[:, None]),
                    other=0.0,
                ),
                0,
            )
    tl.store(grad_position + distance, total, mask=distance < size)
