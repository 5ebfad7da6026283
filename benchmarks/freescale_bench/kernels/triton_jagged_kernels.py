"""The Triton kernel of `triton_jagged`: every move is this one, a copy whose programs share the
target evenly.

A program owns a fixed piece of the target, whatever the runs are like: one giant run is copied by
many programs, thousands of short ones by one. Where a unit (elements that always move together)
comes from, it finds by a binary search of the runs' starts, a table of a few kilobytes that stays
in the first-level cache; bytes are moved as words of up to 8, two at a time.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def move_kernel(
    target,  # words
    addresses,  # [tensors] of the source; of a single one, its address
    # [4, count]: starts and ends in the target, starts in the source (elements), tensors of the
    # source
    runs,
    count,
    steps,  # of the search: count < 2 ** steps
    units,
    SINGLE: tl.constexpr,  # whether the source is one tensor
    ITEM: tl.constexpr,  # bytes of an element
    UNIT: tl.constexpr,  # words of a unit
    UNITS: tl.constexpr,  # of a program
    ALIGNED: tl.constexpr,  # whether units start at multiples of 16 bytes
):
    word = target.dtype.element_ty
    elements: tl.constexpr = UNIT * (word.primitive_bitwidth // 8) // ITEM
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    at = unit * elements
    low = tl.zeros([UNITS], tl.int32)
    high = low + count
    for _ in range(steps):  # starts[low] <= at < starts[high]
        middle = (low + high) // 2
        right = tl.load(runs + middle) <= at
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    inside = (unit < units) & (at < tl.load(runs + count + low))
    element = at - tl.load(runs + low) + tl.load(runs + 2 * count + low)
    base = addresses if SINGLE else tl.load(addresses + tl.load(runs + 3 * count + low))
    address = base + element * ITEM
    columns = tl.arange(0, UNIT)[None, :]
    pointers = address.to(tl.pointer_type(word))[:, None] + columns
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [1, 16])
    values = tl.load(pointers, mask=inside[:, None])
    tl.store(target + unit[:, None] * UNIT + columns, values, mask=inside[:, None])
