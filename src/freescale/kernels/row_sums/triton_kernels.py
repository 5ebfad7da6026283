"""The Triton kernels of `row_sums`: sums of the values of equal rows, which a sort has brought
together.

A row's values are added one after another. A row of more than CHUNK values is cut, from its first
value on, into chunks of CHUNK. A program of its own sums each chunk, and the sums of the chunks are
added one after another. Chunks are found without counting rows or chunks first: at most two chunks
begin in a window of CHUNK sorted positions, one of the row at its first position and one of the row
at its last position.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _locate_rows(rows, count, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """(places in the table, places in the gradients, mask of both, rows, mask of rows) of a
    program's rows."""
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    row = tl.load(rows + number, mask=number < count, other=-1).to(tl.int64)
    columns = tl.arange(0, W)[None, :]
    there = (row >= 0)[:, None] & (columns < WIDTH)
    return row[:, None] * WIDTH + columns, number[:, None] * WIDTH + columns, there, row, row >= 0


@triton.jit
def _find_first(rows, row, at, steps):
    """The first position of `row` among sorted rows; `at` is one of its positions."""
    low, high = at * 0, at
    for _ in range(steps):
        middle = (low + high) // 2
        less = tl.load(rows + middle) < row
        low = tl.where(less, middle + 1, low)
        high = tl.where(less, high, middle)
    return low


@triton.jit
def _add_halves(x, R: tl.constexpr, W: tl.constexpr):
    """[W]: the sum of the rows of x [R, W], half to half. The order of tl.sum follows the layout,
    and the layout follows the dtype that was loaded."""
    if R > 1:
        first, second = tl.split(tl.permute(tl.reshape(x, [2, R // 2, W]), (1, 2, 0)))
        total = _add_halves(first + second, R // 2, W)
    else:
        total = tl.reshape(x, [W])
    return total


@triton.jit(do_not_specialize=["n", "steps"])
def chunk_sums_kernel(
    values, rows, order, partial, n, steps,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Program 2 c (2 c + 1) sums the chunk that begins in window c and belongs to the row of its
    first (last) position."""
    program = tl.program_id(0).to(tl.int64)
    window, last = program // 2, program % 2
    begin = window * CHUNK
    at = tl.where(last == 1, tl.minimum(begin + CHUNK - 1, n - 1), begin)
    row = tl.load(rows + at)
    # A row of more than CHUNK values also has one half a chunk before or behind this position.
    behind = tl.load(rows + at + CHUNK // 2, mask=at + CHUNK // 2 < n, other=-1) == row
    before = tl.load(rows + at - CHUNK // 2, mask=at >= CHUNK // 2, other=-1) == row
    another = (last == 0) | (tl.load(rows + begin) != row)
    if (behind | before) & another & (row >= 0):
        first = _find_first(rows, row, at, steps)
        chunk = first + (tl.maximum(begin - first, 0) + CHUNK - 1) // CHUNK * CHUNK
        long = tl.load(rows + first + CHUNK, mask=first + CHUNK < n, other=-1) == row
        if long & (chunk < begin + CHUNK):
            columns = tl.arange(0, W)[None, :]
            total = tl.zeros([R, W], tl.float32)
            for step in tl.static_range(CHUNK // R):
                place = chunk + step * R + tl.arange(0, R)
                mine = tl.load(rows + place, mask=place < n, other=-1) == row
                value = tl.load(order + place, mask=mine, other=0)
                there = mine[:, None] & (columns < WIDTH)
                total += tl.load(
                    values + value[:, None] * WIDTH + columns, mask=there, other=0.0
                ).to(tl.float32)
            column = tl.arange(0, W)
            total = _add_halves(total, R, W)
            tl.store(partial + program * WIDTH + column, total, mask=column < WIDTH)


@triton.jit
def sum_rows(
    values, rows, order, partial, n,
    CHUNK: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """(positions [R], rows [R], whether a row begins there [R], its sum [R, W]) of a program's R
    sorted positions. 2 ** STEPS > CHUNK; partial: from the kernel above."""
    i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    row = tl.load(rows + i, mask=i < n, other=-1)
    before = tl.load(rows + i - 1, mask=(i < n) & (i > 0), other=-1)
    begins = (row >= 0) & (row != before)
    # Bisect for its number of values, up to CHUNK + 1.
    low = tl.zeros([R], tl.int32)
    high = low + CHUNK + 1
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        inside = begins & (i + middle < n)
        same = inside & (tl.load(rows + i + middle, mask=inside, other=-1) == row)
        low = tl.where(same, middle, low)
        high = tl.where(same, high, middle)
    long = begins & (low == CHUNK)
    length = tl.where(begins & (low < CHUNK), low + 1, 0)
    columns = tl.arange(0, W)[None, :]
    narrow = columns < WIDTH
    value = tl.load(order + i, mask=length > 0, other=0)
    total = tl.load(
        values + value[:, None] * WIDTH + columns, mask=(length > 0)[:, None] & narrow, other=0.0
    ).to(tl.float32)
    longest = tl.max(length, 0)
    for first in range(1, longest, UNROLL):
        for more in tl.static_range(UNROLL):
            left = first + more < length
            value = tl.load(order + i + first + more, mask=left, other=0)
            # Masked values are negative zero, which changes no bit.
            total += tl.load(
                values + value[:, None] * WIDTH + columns, mask=left[:, None] & narrow, other=-0.0
            ).to(tl.float32)
    # The first chunk begins at the start of its window or behind it. All others belong to the row
    # at the first position of their window.
    window = i // CHUNK * 2
    slot = tl.where(i % CHUNK == 0, window, window + 1)
    chunk = tl.load(partial + slot[:, None] * WIDTH + columns, mask=long[:, None] & narrow, other=0)
    total = tl.where(long[:, None], chunk, total)
    number = tl.full([], 1, tl.int64)
    left = long
    while tl.max(left.to(tl.int32), 0) > 0:
        for _ in tl.static_range(UNROLL):
            inside = left & (i + number * CHUNK < n)
            left = inside & (tl.load(rows + i + number * CHUNK, mask=inside, other=-1) == row)
            place = (window + 2 * number)[:, None] * WIDTH + columns
            total += tl.load(partial + place, mask=left[:, None] & narrow, other=-0.0)
            number += 1
    return i, row.to(tl.int64), begins, total


@triton.jit(do_not_specialize=["n"])
def row_sums_kernel(
    values, rows, order, partial, out, found, n,
    DENSE: tl.constexpr,  # out has a place for each row; else for each sorted position
    ADDS: tl.constexpr,  # adds to the values in out
    CHUNK: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """found [n]: the row that begins at a sorted position, -1 if none does."""
    i, row, begins, total = sum_rows(
        values, rows, order, partial, n, CHUNK, STEPS, UNROLL, WIDTH, R, W
    )
    if DENSE:
        place = row
    else:
        place = i
        tl.store(found + i, tl.where(begins, row, -1), mask=i < n)
    columns = tl.arange(0, W)[None, :]
    target, there = out + place[:, None] * WIDTH + columns, begins[:, None] & (columns < WIDTH)
    total = total.to(out.dtype.element_ty)
    if ADDS:
        total = (total.to(tl.float32) + tl.load(target, mask=there, other=0.0).to(tl.float32)).to(
            out.dtype.element_ty
        )
    tl.store(target, total, mask=there)


@triton.jit
def _sum_row(
    values, rows, order, partial, row, i, n,
    CHUNK: tl.constexpr, UNROLL: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The sum [W] of the row that begins at sorted position i, as in `sum_rows`."""
    column = tl.arange(0, W)
    narrow = column < WIDTH
    if tl.load(rows + i + CHUNK, mask=i + CHUNK < n, other=-1) == row:
        slot = i // CHUNK * 2
        first = slot + tl.where(i % CHUNK == 0, 0, 1)
        total = tl.load(partial + first * WIDTH + column, mask=narrow, other=0.0).to(tl.float32)
        at = i + CHUNK
        while tl.load(rows + at, mask=at < n, other=-1) == row:
            for _ in tl.static_range(UNROLL):
                slot += 2
                same = tl.load(rows + at, mask=at < n, other=-1) == row
                chunk = tl.load(partial + slot * WIDTH + column, mask=same & narrow, other=-0.0)
                total += chunk.to(tl.float32)
                at += CHUNK
    else:
        value = tl.load(order + i)
        total = tl.load(values + value * WIDTH + column, mask=narrow, other=0.0).to(tl.float32)
        at = i + 1
        while tl.load(rows + at, mask=at < n, other=-1) == row:
            for _ in tl.static_range(UNROLL):
                same = tl.load(rows + at, mask=at < n, other=-1) == row
                value = tl.load(order + at, mask=same, other=0)
                # Masked values are negative zero, which changes no bit.
                more = tl.load(values + value * WIDTH + column, mask=same & narrow, other=-0.0)
                total += more.to(tl.float32)
                at += 1
    return total


@triton.jit(do_not_specialize=["n"])
def wide_row_sums_kernel(
    values, rows, order, partial, out, found, n,
    DENSE: tl.constexpr, ADDS: tl.constexpr, CHUNK: tl.constexpr, UNROLL: tl.constexpr,
    SPAN: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """As `row_sums_kernel`, for rows that occupy a warp or more: a program sums the rows that begin
    at its SPAN positions one after another. Most positions begin none."""
    begin = tl.program_id(0).to(tl.int64) * SPAN
    column = tl.arange(0, W)
    for i in range(begin, tl.minimum(begin + SPAN, n)):
        row = tl.load(rows + i)
        begins = (row >= 0) & (tl.load(rows + i - 1, mask=i > 0, other=-1) != row)
        if not DENSE:
            tl.store(found + i, tl.where(begins, row, -1))
        if begins:
            total = _sum_row(values, rows, order, partial, row, i, n, CHUNK, UNROLL, WIDTH, W)
            place = row.to(tl.int64) if DENSE else i
            target = out + place * WIDTH + column
            total = total.to(out.dtype.element_ty)
            if ADDS:
                before = tl.load(target, mask=column < WIDTH, other=0.0).to(tl.float32)
                total = (total.to(tl.float32) + before).to(out.dtype.element_ty)
            tl.store(target, total, mask=column < WIDTH)


# ids and out are parts of larger tensors: their alignment changes from batch to batch.
@triton.jit(
    do_not_specialize=["n", "stride", "rows", "base"], do_not_specialize_on_alignment=["ids", "out"]
)
def spread_kernel(ids, out, n, stride, rows, base, BLOCK: tl.constexpr):
    """out[i] = ids[i] * stride % rows + base; a negative id names no row, and stays so."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(ids + i, mask=i < n, other=0).to(tl.int64)
    row = tl.where(number < 0, -1, number * stride % rows + base)
    tl.store(out + i, row.to(out.dtype.element_ty), mask=i < n)


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
