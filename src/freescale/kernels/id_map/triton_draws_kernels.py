"""The Triton kernels of `draws`."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.id_map import buckets as draw_buckets

ROWS = tl.constexpr(draw_buckets.ROWS)
SHARD = tl.constexpr(draw_buckets.SHARD)
HALF = tl.constexpr(draw_buckets.HALF)
LOW = tl.constexpr((1 << draw_buckets.HALF) - 1)


@triton.jit
def _find_places(key, first_shard, BUCKETS: tl.constexpr):
    """The places of the two sums of each key."""
    row = ((key >> SHARD) - first_shard) * ROWS
    upper = row * BUCKETS + ((((key >> HALF) & LOW) * BUCKETS) >> HALF)
    lower = (row + 1) * BUCKETS + (((key & LOW) * BUCKETS) >> HALF)
    return upper, lower


@triton.jit(
    do_not_specialize=["count", "first_shard"], do_not_specialize_on_alignment=["keys", "worth"]
)
def add_draws_kernel(
    sums, keys, worth, count, first_shard,
    SIGN: tl.constexpr, BUCKETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    each = tl.load(worth + at, mask=there, other=0) * SIGN
    upper, lower = _find_places(tl.load(keys + at, mask=there, other=0), first_shard, BUCKETS)
    counts = there & (each != 0)  # most ids of a batch are worth nothing
    tl.atomic_add(sums + upper, each, mask=counts, sem="relaxed")
    tl.atomic_add(sums + lower, each, mask=counts, sem="relaxed")


@triton.jit(
    do_not_specialize=["count", "first_shard"], do_not_specialize_on_alignment=["keys"]
)  # fmt: skip
def estimate_log_kernel(
    sums, keys, found, count, first_shard, BUCKETS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    upper, lower = _find_places(tl.load(keys + at, mask=there, other=0), first_shard, BUCKETS)
    least = tl.minimum(
        tl.load(sums + upper, mask=there, other=1), tl.load(sums + lower, mask=there, other=1)
    )
    log = tl.log(tl.maximum(least, 1).to(tl.float64))
    tl.store(found + at, log.to(tl.float32), mask=there)
