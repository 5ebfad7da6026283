"""The Triton kernels of `row_moves`, with the draws of freescale.random."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.draw_kernels import _derive


@triton.jit
def _draw(id, seed, column):
    """Standard normal draws for ids [R, 1] and columns [1, W] of the table with this seed."""
    key = _derive(_derive(seed, id), column.to(tl.uint64))
    # Converting 32-bit integers to floats is four times as fast as converting 64-bit ones.
    first = ((key >> 40).to(tl.uint32).to(tl.float32) + 0.5) * (2.0**-24)  # exact, and never 0
    second = key.to(tl.uint32).to(tl.float32) * (2.0**-32)
    return tl.sqrt_rn(-2.0 * tl.log(first)) * _cos_of_turns(second)


@triton.jit
def _cos_of_turns(x):
    """cos(2 pi x) for x in [0, 1], to 2e-7: the sine of an angle of up to a quarter turn. A general
    cosine takes four times as long, and these draws are most of the kernel's work."""
    angle = tl.abs(x - 0.5) - 0.25
    square = angle * angle
    factor = 39.536705333336506 * square - 76.54978219071661
    factor = factor * square + 81.60100406844559
    factor = factor * square - 41.34165503133288
    return angle * (factor * square + 6.283185160089086)


@triton.jit(do_not_specialize=["count", "std"])
def exchange_kernel(
    table, slots, kept, ids, seeds, state, kept_state, total, count, std,
    DRAWS: tl.constexpr, SWAPS: tl.constexpr,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Moves slot slots[i] to kept[i], and writes to the slot the initial row of ids[i] (DRAWS, with
    seeds [1]), the previous kept[i] (SWAPS), or zeros. Exchanges `count` rows, but at most total
    [1] if it is given. state, kept_state: an optional number of each row, replaced by zero. A
    program exchanges R rows of up to W columns."""
    if total is not None:
        count = tl.minimum(count, tl.load(total).to(tl.int32))
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    slot = tl.load(slots + number, mask=number < count, other=0)
    column = tl.arange(0, W)[None, :]
    there = (number < count)[:, None] & (column < WIDTH)
    place = table + slot[:, None] * WIDTH + column
    target = kept + number[:, None] * WIDTH + column
    before = tl.load(place, mask=there, other=0.0)
    after = tl.zeros([R, W], table.dtype.element_ty)
    if DRAWS:
        id = tl.load(ids + number, mask=number < count, other=0).to(tl.uint64, bitcast=True)
        seed = tl.load(seeds).to(tl.uint64, bitcast=True)
        after = _draw(id[:, None], seed, column) * std
    if SWAPS:
        after = tl.load(target, mask=there, other=0.0)
    tl.store(place, after, mask=there)
    tl.store(target, before, mask=there)
    if state is not None:
        was = tl.load(state + slot, mask=number < count, other=0.0)
        tl.store(kept_state + number, was, mask=number < count)
        tl.store(state + slot, tl.zeros([R], state.dtype.element_ty), mask=number < count)


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["to_rows", "rows"]
)  # fmt: skip
def copy_rows_kernel(
    to, to_rows, source, rows, count, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """to[to_rows[i]] = source[rows[i]]. A program copies R rows of up to W columns at a time, until
    all are copied."""
    column = tl.arange(0, W)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(count, R), tl.num_programs(0)):
        number = block * R + tl.arange(0, R)
        there = number < count
        row = tl.load(rows + number, mask=there, other=0)
        to_row = tl.load(to_rows + number, mask=there, other=0)
        inside = there[:, None] & (column < WIDTH)
        values = tl.load(source + row[:, None] * WIDTH + column, mask=inside, other=0)
        tl.store(to + to_row[:, None] * WIDTH + column, values, mask=inside)
