"""The Triton kernel of `row_copies`."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["to_rows", "rows"]
)  # fmt: skip
def copy_rows_kernel(
    to, to_rows, source, rows, count, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """to[to_rows[i]] = source[rows[i]]. A program copies R rows of up to W columns at a time, as
    often as there are some."""
    column = tl.arange(0, W)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(count, R), tl.num_programs(0)):
        number = block * R + tl.arange(0, R)
        there = number < count
        row = tl.load(rows + number, mask=there, other=0)
        to_row = tl.load(to_rows + number, mask=there, other=0)
        inside = there[:, None] & (column < WIDTH)
        values = tl.load(source + row[:, None] * WIDTH + column, mask=inside, other=0)
        tl.store(to + to_row[:, None] * WIDTH + column, values, mask=inside)
