"""The Triton kernel of `rank_sums`."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["count", "ranks", "copies"],
    do_not_specialize_on_alignment=["parts", "total"],
)
def sum_in_order_kernel(parts, total, count, ranks, copies, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    part = parts + at
    summed = tl.load(part, mask=there)
    for _ in range(1, ranks):
        part += count
        summed += tl.load(part, mask=there)
    to = total + at
    for _ in range(copies):
        tl.store(to, summed, mask=there)
        to += count
