"""The Triton kernel of `division`."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["count", "first", "ranks", "pieces", "steps"],
    do_not_specialize_on_alignment=["tags", "marked", "rows", "bounds"],
)
def tag_kernel(tags, marked, rows, bounds, count, first, ranks, pieces, steps, BLOCK: tl.constexpr):
    """A list's tags, from `first` on. Its rows of rank r are from bounds[r] to bounds[r + 1], which
    is found in so many `steps`."""
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
