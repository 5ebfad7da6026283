"""The Triton kernel that fills the table of pair biases, a tile of queries in each program."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.triton_bias_sums_kernels import _bucket_range
from freescale.kernels.attention.triton_kernels import (
    COLUMNS_OF_PAIRS,
    TILE_COLUMNS,
    TILE_HISTORY,
    TILE_LENGTH,
    TILE_PAIRS,
    TILE_ROW,
    TILE_START,
    _distance,
    _find_pairs,
    _look_up,
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
