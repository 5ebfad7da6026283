"""The Triton kernels of `rows`: gather, and sums of segments.

A program works on R rows of up to W columns, a power of two. Row numbers are 64-bit before they are
multiplied; a negative one names no row and is skipped.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret  # as it was when the kernels below were made


@triton.jit
def _locate_rows(rows, count, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """(places in the table, places in the gradients, which are there, rows, which of them) of a
    program's rows."""
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    row = tl.load(rows + number, mask=number < count, other=-1).to(tl.int64)
    columns = tl.arange(0, W)[None, :]
    there = (row >= 0)[:, None] & (columns < WIDTH)
    return row[:, None] * WIDTH + columns, number[:, None] * WIDTH + columns, there, row, row >= 0


@triton.jit(do_not_specialize=["count"])
def gather_kernel(weight, rows, out, count, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    place, target, there, _, _ = _locate_rows(rows, count, WIDTH, R, W)
    values = tl.load(weight + place, mask=there)
    tl.store(out + target, values.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count"])
def segments_kernel(
    values, order, starts, out, count,
    KEPT: tl.constexpr,  # the count of segments is read where `count` points
    LONG: tl.constexpr,  # segments of more values are left to the kernels below; 0: none are
    UNROLL: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Adds one value after another, from the first."""
    segments = tl.load(count) if KEPT else count
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    mine = number < segments
    start = tl.load(starts + number, mask=mine, other=0)
    length = tl.load(starts + number + 1, mask=mine, other=0) - start
    if LONG > 0:
        mine = mine & (length <= LONG)
        length = tl.where(mine, length, 0)
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
            # From where there is none: negative zero, which changes no bit.
            total += tl.load(values + value[:, None] * WIDTH + columns, mask=there, other=-0.0).to(
                tl.float32
            )
    target = out + number[:, None] * WIDTH + columns
    tl.store(target, total.to(out.dtype.element_ty), mask=mine[:, None] & (columns < WIDTH))


@triton.jit
def _find(ends, chunk, count, steps):
    """(number, first chunk, chunks) of the segment that a chunk belongs to; ends [count]: chunks up
    to and with each segment."""
    low = tl.full([], -1, tl.int32)
    high = low + 1 + count
    for _ in range(steps):  # ends[low] <= chunk < ends[high]
        middle = (low + high + 1) // 2
        right = tl.load(ends + middle, mask=middle < count, other=2147483647) <= chunk
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    first = tl.load(ends + high - 1, mask=high > 0, other=0)
    return high, first, tl.load(ends + high) - first


@triton.jit(do_not_specialize=["count", "steps"])
def chunks_kernel(
    values, order, starts, ends, partial, count, steps,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Long segments, cut from their starts into chunks of CHUNK values: the sum of one chunk."""
    chunk = tl.program_id(0)
    if chunk < tl.load(ends + count - 1):
        segment, first, _ = _find(ends, chunk, count, steps)
        start = tl.load(starts + segment) + (chunk - first).to(tl.int64) * CHUNK
        end = tl.minimum(start + CHUNK, tl.load(starts + segment + 1))
        columns = tl.arange(0, W)[None, :]
        total = tl.zeros([R, W], tl.float32)
        for step in tl.static_range(CHUNK // R):
            at = start + step * R + tl.arange(0, R)
            value = tl.load(order + at, mask=at < end, other=0)
            there = (at < end)[:, None] & (columns < WIDTH)
            total += tl.load(values + value[:, None] * WIDTH + columns, mask=there, other=0.0).to(
                tl.float32
            )
        column = tl.arange(0, W)
        tl.store(
            partial + chunk.to(tl.int64) * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH
        )


@triton.jit(do_not_specialize=["count", "steps"])
def long_segments_kernel(
    partial, ends, out, count, steps, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):
    """The sum of a long segment's chunks, by the program of its first one."""
    chunk = tl.program_id(0)
    if chunk < tl.load(ends + count - 1):
        segment, first, chunks = _find(ends, chunk, count, steps)
        if chunk == first:
            columns = tl.arange(0, W)[None, :]
            total = tl.zeros([R, W], tl.float32)
            for step in range(0, chunks, R):
                at = step + tl.arange(0, R)
                there = (at < chunks)[:, None] & (columns < WIDTH)
                total += tl.load(
                    partial + (chunk + at).to(tl.int64)[:, None] * WIDTH + columns,
                    mask=there,
                    other=0.0,
                )
            column = tl.arange(0, W)
            sums = tl.sum(total, 0).to(out.dtype.element_ty)
            tl.store(out + segment.to(tl.int64) * WIDTH + column, sums, mask=column < WIDTH)
