"""The Triton kernels of `rows`: gather, and sums of segments.

A program works on R rows of up to W columns, a power of two. Row numbers are 64-bit before they are
multiplied; a negative one means no row and is skipped.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


# The rows of one feature begin anywhere among the rows of a batch.
@triton.jit(do_not_specialize=["count", "places"], do_not_specialize_on_alignment=["rows"])
def gather_kernel(
    weight, rows, out, count, places,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Adds the rows of each value's places one after another. A negative row number gives zeros."""
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns, inside = tl.arange(0, W)[None, :], number < count
    row = tl.load(rows + number * places, mask=inside, other=-1).to(tl.int64)[:, None]
    there = (row >= 0) & (columns < WIDTH)
    total = tl.load(weight + row * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
    for place in range(1, places):
        row = tl.load(rows + number * places + place, mask=inside, other=-1).to(tl.int64)[:, None]
        there = (row >= 0) & (columns < WIDTH)
        total += tl.load(weight + row * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
    target = out + number[:, None] * WIDTH + columns
    tl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & (columns < WIDTH))


@triton.jit(do_not_specialize=["count"])
def segments_kernel(
    values, order, starts, out, count,
    KEPT: tl.constexpr,  # `count` points to the number of segments
    UNROLL: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Adds the values of a segment one after another, from the first."""
    segments = tl.load(count) if KEPT else count
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    mine = number < segments
    start = tl.load(starts + number, mask=mine, other=0)
    length = tl.load(starts + number + 1, mask=mine, other=0) - start
    columns = tl.arange(0, W)[None, :]
    value = tl.load(order + start, mask=length > 0, other=0)
    there = (length > 0)[:, None] & (columns < WIDTH)
    total = tl.load(values + value[:, None] * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
    longest = tl.max(length, 0)
    for first in range(1, longest, UNROLL):
        for more in tl.static_range(UNROLL):
            left = first + more < length
            value = tl.load(order + start + first + more, mask=left, other=0)
            there = left[:, None] & (columns < WIDTH)
            # Masked values are negative zero, which changes no bit.
            total += tl.load(values + value[:, None] * WIDTH + columns, mask=there, other=-0.0).to(
                tl.float32
            )
    target = out + number[:, None] * WIDTH + columns
    tl.store(target, total.to(out.dtype.element_ty), mask=mine[:, None] & (columns < WIDTH))
