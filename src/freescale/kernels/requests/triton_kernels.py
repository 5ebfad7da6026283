"""The Triton kernels of `requests`: the steps around torch's sort and scan, and tags."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n"])
def flags_kernel(keys, flags, n, BLOCK: tl.constexpr):
    """flags[i] = 1 if keys[i], which are sorted, differs from the key before."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(keys + i, mask=i < n, other=0)
    before = tl.load(keys + i - 1, mask=(i > 0) & (i < n), other=0)
    tl.store(flags + i, ((i == 0) | (mine != before)).to(tl.int32), mask=i < n)


@triton.jit(do_not_specialize=["n"])
def unique_kernel(keys, order, ranks, unique, inverse, starts, n, BLOCK: tl.constexpr):
    """keys: sorted; ranks: the cumulative sum of flags. Fills all of unique, inverse and starts."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    rank = tl.load(ranks + i, mask=inside, other=0)
    before = tl.load(ranks + i - 1, mask=inside & (i > 0), other=0)
    count = tl.load(ranks + n - 1)
    tl.store(inverse + tl.load(order + i, mask=inside, other=0), rank.to(tl.int64) - 1, mask=inside)
    first = inside & (rank != before)
    key = tl.load(keys + i, mask=inside, other=0)
    tl.store(unique + rank - 1, key, mask=first)
    tl.store(starts + rank - 1, i, mask=first)
    # The rest, behind the last key, which nothing above writes.
    behind = tl.zeros([BLOCK], tl.int64)
    tl.store(unique + i, behind - 1, mask=inside & (i >= count))
    tl.store(starts + i, behind + n, mask=(i <= n) & (i >= count))


@triton.jit
def _below(keys, wanted, n, steps, BLOCK: tl.constexpr):
    """How many of n sorted keys are less than each wanted one."""
    low = tl.zeros([BLOCK], tl.int32) - 1
    high = low + 1 + n
    for _ in range(steps):  # keys[low] < wanted <= keys[high]
        middle = (low + high + 1) // 2
        right = (middle < n) & (tl.load(keys + middle, mask=middle < n, other=0) < wanted)
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return high


@triton.jit(do_not_specialize=["n", "steps", "count"])
def edges_kernel(keys, ranks, edges, counts, n, steps, count, BLOCK: tl.constexpr):
    """counts[e]: unique keys below edges[e] and not below edges[e - 1], if there is one."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = _below(keys, tl.load(edges + e, mask=e < count, other=0), n, steps, BLOCK)
    before = tl.load(edges + e - 1, mask=(e > 0) & (e < count), other=0)
    start = tl.where(e > 0, _below(keys, before, n, steps, BLOCK), 0)
    total = tl.load(ranks + end - 1, mask=end > 0, other=0) - tl.load(
        ranks + start - 1, mask=start > 0, other=0
    )
    tl.store(counts + e, total.to(tl.int64), mask=e < count)


@triton.jit(do_not_specialize=["n", "m", "steps"], do_not_specialize_on_alignment=["keys"])
def members_kernel(keys, among, out, n, m, steps, BLOCK: tl.constexpr):
    """out[i]: whether keys[i] is one of m sorted others."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + i, mask=i < n, other=0)
    place = _below(among, key, m, steps, BLOCK)
    found = (place < m) & (tl.load(among + place, mask=place < m, other=0) == key)
    tl.store(out + i, found.to(tl.int8), mask=i < n)


@triton.jit(
    do_not_specialize=["count", "first", "ranks", "pieces", "steps"],
    do_not_specialize_on_alignment=["tags", "marked", "rows", "bounds"],
)
def tag_kernel(tags, marked, rows, bounds, count, first, ranks, pieces, steps, BLOCK: tl.constexpr):
    """The tags of a list, from `first` on. Its rows of rank r are from bounds[r] to bounds[r + 1];
    a bisection of `steps` steps finds r."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    rank = tl.zeros([BLOCK], tl.int32)
    high = rank + ranks - 1
    for _ in range(steps):
        middle = (rank + high) // 2
        behind = tl.load(bounds + middle + 1) <= at
        rank = tl.where(behind, tl.minimum(middle + 1, ranks - 1), rank)
        high = tl.where(behind, high, middle)
    row = tl.load(rows + at, mask=there, other=0)
    piece = (row & (pieces - 1)).to(tl.int32) + 1
    own = tl.load(marked + at, mask=there, other=0) != 0
    tl.store(tags + at, first + rank + tl.where(own, 0, piece * ranks), mask=there)
