"""The sums of the gradients of the attention's biases.

The kernel for queries adds the gradients of the scores of each tile by distance and by bucket, in
registers; a further kernel adds these sums, in a fixed order. All heads share the biases.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.plan_columns import TileColumn

# Columns of the plan's tables: kernels read only globals that are constexpr.
TILE_LENGTH = tl.constexpr(TileColumn.LENGTH.value)
TILE_HISTORY = tl.constexpr(TileColumn.HISTORY.value)
TILE_ROW = tl.constexpr(TileColumn.ROW.value)
TILE_SUMS = tl.constexpr(TileColumn.SUMS.value)
TILE_COLUMNS = tl.constexpr(len(TileColumn))
BUCKETS_PER_OCTAVE = tl.constexpr(0.6931471805599453 / 0.301)


@triton.jit
def _bucket_range(later, earlier, buckets):
    """The lowest and highest bucket that pairs of these times can have."""
    shortest = tl.maximum(tl.min(later, 0) - tl.max(earlier, 0), 1).to(tl.float32)
    longest = tl.maximum(tl.max(later, 0) - tl.min(earlier, 0), 1).to(tl.float32)
    lowest = tl.maximum(tl.log2(shortest) * BUCKETS_PER_OCTAVE - 1e-3, 0.0).to(tl.int32)
    highest = (tl.log2(longest) * BUCKETS_PER_OCTAVE + 1e-3).to(tl.int32)
    return tl.minimum(lowest, buckets), tl.minimum(highest, buckets)


@triton.jit
def _store_distances(
    change, distances, by_self, i, j, row, key, head, sample, tokens,
    M: tl.constexpr, N: tl.constexpr, CANDIDATES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Stores the sums of change [M, N] along its diagonals, for the queries [row, row + M) of the
    history and the keys [key, key + N).

    Turned by its row, a diagonal is a part of a column: [a, c] takes the key (a - c) mod N, whose
    distance is row - key + c + floor((a - c) / N) * N. A tile of queries has a part of row + M
    numbers for each of these floors: every distance is stored there once. All candidates of a
    sample have one position, so their distances repeat along columns, in a further part; `by_self`
    [HEADS, tokens] has a candidate's score with itself.
    """
    start, length, history, _ = sample
    room = row + M
    lanes, columns = tl.arange(0, M), tl.arange(0, N)
    own = tl.where((i < (history if CANDIDATES else length))[:, None], change, 0.0)
    turned = tl.gather(own, (lanes[:, None] + N - columns[None, :]) % N, 1).to(tl.float32)
    group = (lanes[:, None] + N - columns[None, :]) // N
    for part in tl.static_range(M // N + 1):
        distance = row - key + (part - 1) * N + columns
        sums = tl.sum(tl.where(group == part, turned, 0.0), 0)
        inside = (distance >= 0) & (distance < room) & (row < history)
        tl.store(distances + part * room + distance, sums, mask=inside)
    if CANDIDATES:  # noqa: SIM102 - decided when it is compiled
        if row + M > history:
            wide = tl.where(((i >= history) & (i < length))[:, None], change.to(tl.float32), 0.0)
            place = distances + (M // N + 1) * room + history - j
            tl.store(place, tl.sum(wide, 0), mask=j < history)
            if MASKED:
                alone = tl.sum(tl.where(i[:, None] == j[None, :], wide, 0.0), 1)
                mine = (i >= tl.maximum(key, history)) & (i < tl.minimum(key + N, length))
                tl.store(by_self + head.to(tl.int64) * tokens + start + i, alone, mask=mine)


@triton.jit
def _add_to_buckets(state, change, bias, start, length, later, j, BUCKETS: tl.constexpr):
    """The state (bucket, sums of its pairs [M] and of those of the next one [M], sums of all other
    pairs [BUCKETS]) plus change [M, N], for times `later` [M] and those of the keys j.

    Along the keys of a tile of queries the time between two tokens changes little: the sums of two
    adjacent buckets stay in registers, row by row, until a tile has other buckets.
    """
    current, lower, upper, histogram = state
    _, _, _, edges, times, buckets = bias
    bins = tl.arange(0, BUCKETS)
    earlier = tl.load(times + start + tl.minimum(j, length - 1))
    lowest, highest = _bucket_range(later, earlier, buckets)
    if (lowest < current) | (highest > current + 1):
        histogram += tl.where(bins == current, tl.sum(lower, 0), 0.0)
        histogram += tl.where(bins == current + 1, tl.sum(upper, 0), 0.0)
        lower, upper = tl.zeros_like(lower), tl.zeros_like(upper)
        current = tl.maximum(highest - 1, 0)
    elapsed = later[:, None] - earlier[None, :]
    if lowest == highest:  # the whole tile has one
        sums = tl.sum(change, 1)
        lower += tl.where(lowest == current, sums, 0.0)
        upper += tl.where(lowest == current, 0.0, sums)
    else:
        at_top = elapsed >= tl.load(edges + current + 1)
        inside = (elapsed >= tl.load(edges + current)) | (current == 0)
        upper += tl.sum(tl.where(at_top, change, 0.0), 1)
        lower += tl.sum(tl.where(inside & (at_top == 0), change, 0.0), 1)
        for bucket in range(lowest, current):
            # in this bucket: at or above its edge, but not above the next
            inside = (elapsed >= tl.load(edges + bucket)) | (bucket == 0)
            inside = inside & (elapsed < tl.load(edges + bucket + 1))
            part = tl.sum(tl.sum(tl.where(inside, change, 0.0), 1), 0)
            histogram += tl.where(bins == bucket, part, 0.0)
    return current, lower, upper, histogram


@triton.jit
def _finish_buckets(state, BUCKETS: tl.constexpr):
    """[BUCKETS]: all sums of `_add_to_buckets`."""
    current, lower, upper, histogram = state
    bins = tl.arange(0, BUCKETS)
    histogram += tl.where(bins == current, tl.sum(lower, 0), 0.0)
    return histogram + tl.where(bins == current + 1, tl.sum(upper, 0), 0.0)


@triton.jit(do_not_specialize=["plane", "count", "size"])
def sum_distances_kernel(
    by_distance, tiles, plane, count, sums, size, factor,
    HEADS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CANDIDATES: tl.constexpr,
    SPLIT: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """sums [HEADS * SPLIT, size]: of D distances of one head, over one of SPLIT parts of the tiles,
    S tiles at a time."""
    head, number = tl.program_id(1) // SPLIT, tl.program_id(1) % SPLIT
    distance = tl.program_id(0) * D + tl.arange(0, D)
    parts: tl.constexpr = M // N + 1
    total = tl.zeros([S, D], tl.float32)
    for first in range(number * S, count, SPLIT * S):
        at = first + tl.arange(0, S)
        tile, there = tiles + at * TILE_COLUMNS, at < count
        row = tl.load(tile + TILE_ROW, mask=there, other=0)
        length = tl.load(tile + TILE_LENGTH, mask=there, other=0)
        history = tl.load(tile + TILE_HISTORY, mask=there, other=0)
        slot = tl.load(tile + TILE_SUMS, mask=there, other=0).to(tl.int64)
        region = by_distance + head.to(tl.int64) * plane + slot * (parts + CANDIDATES)
        for part in tl.static_range(parts + CANDIDATES):
            stop = tl.where(row < history, row + part * N, 0)
            if part == parts:  # the last part has the candidates
                stop = tl.where((row + M > history) & (history < length), history + 1, 0)
            place = region[:, None] + (part * (row + M))[:, None] + distance[None, :]
            inside = distance[None, :] < stop[:, None]
            total += tl.load(place, mask=inside, other=0.0)
    place = sums + tl.program_id(1).to(tl.int64) * size + distance
    tl.store(place, tl.sum(total, 0) * factor, mask=distance < size)
