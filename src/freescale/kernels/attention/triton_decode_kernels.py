"""The Triton kernels of one new event for each of several users.

Everything about a user is in a table in device memory, addresses included, so a launch depends on
the number of users alone and a CUDA graph can repeat it. A row without a user reads and writes
nothing. Each program sums a fixed part of a head's keys in float32, and the parts are added in
their order: the result depends on the lengths alone.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.plan_columns import NewEventColumn
from freescale.kernels.attention.triton_kernels import _bucket, _distance

# Columns of the table: kernels read only globals that are constexpr.
KEYS = tl.constexpr(NewEventColumn.KEYS.value)
VALUES = tl.constexpr(NewEventColumn.VALUES.value)
SLOTS = tl.constexpr(NewEventColumn.SLOTS.value)
PREFIX = tl.constexpr(NewEventColumn.PREFIX.value)
LENGTH = tl.constexpr(NewEventColumn.LENGTH.value)
SKIPPED = tl.constexpr(NewEventColumn.SKIPPED.value)
TIMES = tl.constexpr(NewEventColumn.TIMES.value)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _read_part(row, at, lanes, D: tl.constexpr):
    return _silu(tl.load(row + at + lanes, mask=lanes < D, other=0.0))


@triton.jit
def _point(memory, slot, lanes, D: tl.constexpr):
    """Pointers to the rows of some slots. The compiler cannot see that an address from a table is
    aligned, and would load element by element."""
    pointers = memory + slot[:, None] * D + lanes[None, :]
    if D % 4 == 0:
        pointers = tl.multiple_of(pointers, [1, 16])
    return pointers


@triton.jit(do_not_specialize=["layer", "farthest", "buckets", "first_keys", "last_keys"])
def sum_keys_kernel(
    rows, table, sums, layer, position_bias, farthest, time_bias, edges, buckets,
    key_scale, value_scale, first_keys, last_keys,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr,
    QK: tl.constexpr, V: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The new event's attention over one part of the keys of a head. The first part also has the
    event itself, and writes its key and value behind the others.

    Args:
        rows: [users, u | v | q | k], before SiLU.
        table: [users, COLUMNS], NewEventColumn first.
        sums: [users, PARTS, HEADS * D_V].
    """
    part, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS % HEADS
    user = (tl.program_id(0) // PARTS // HEADS).to(tl.int64)
    entry, row = table + user * COLUMNS, rows + user * (2 * HEADS * (D_QK + D_V))
    address, slots = tl.load(entry + KEYS), tl.load(entry + SLOTS)
    first = (layer * HEADS + head) * slots  # of this head, in rows
    keys = address.to(tl.pointer_type(tl.float32)) + first * D_QK
    values = tl.load(entry + VALUES).to(tl.pointer_type(tl.float32)) + first * D_V
    prefix, length = tl.load(entry + PREFIX).to(tl.int32), tl.load(entry + LENGTH).to(tl.int32)
    of_qk, of_v = tl.arange(0, QK), tl.arange(0, V)
    q = _read_part(row, HEADS * 2 * D_V + head * D_QK, of_qk, D_QK)
    skipped = tl.load(entry + SKIPPED).to(tl.int32)
    seen = tl.where(address != 0, prefix + length - skipped, 0)
    span = tl.cdiv(tl.cdiv(seen, PARTS), N) * N
    total = tl.zeros([V], tl.float32)
    for start in range(part * span, tl.minimum(part * span + span, seen), N):
        slot = start + tl.arange(0, N)
        there, event = (slot < seen)[:, None], tl.maximum(slot - prefix, 0)
        if last_keys is not None:
            event = tl.where(event < first_keys, event, event + skipped)
            near = (length - event < last_keys) | (event < first_keys) | (slot < prefix)
            there = there & near[:, None]
        k = tl.load(_point(keys, slot, of_qk, D_QK), mask=there & (of_qk < D_QK), other=0.0)
        v = tl.load(_point(values, slot, of_v, D_V), mask=there & (of_v < D_V), other=0.0)
        score = tl.sum(k * q[None, :], 1)
        bias = tl.zeros_like(score)
        if position_bias is not None:
            bias += tl.load(position_bias + _distance(length, event, length, farthest))
        if time_bias is not None:
            times = tl.load(entry + TIMES).to(tl.pointer_type(tl.int64))
            bias += tl.load(
                time_bias
                + _bucket(length, event, 0, length + 1, times, edges, buckets, INLINE=False)
            )
        score += tl.where(slot >= prefix, bias, 0.0)
        total += tl.sum(_silu(score)[:, None] * v, 0)
    if part == 0:
        k = _read_part(row, HEADS * (2 * D_V + D_QK) + head * D_QK, of_qk, D_QK) * key_scale
        v = _read_part(row, HEADS * D_V + head * D_V, of_v, D_V) * value_scale
        last = (prefix + length - skipped).to(tl.int64)
        tl.store(keys + last * D_QK + of_qk, k, mask=(of_qk < D_QK) & (address != 0))
        tl.store(values + last * D_V + of_v, v, mask=(of_v < D_V) & (address != 0))
        score = tl.sum(k * q, 0)
        if position_bias is not None:
            score += tl.load(position_bias)
        if time_bias is not None:
            score += tl.load(time_bias)
        total += _silu(score) * v
    of_head = sums + ((user * PARTS + part) * HEADS + head) * D_V
    tl.store(of_head + of_v, total, mask=of_v < D_V)


@triton.jit
def gate_kernel(
    sums, rows, weight, bias, out, eps,
    WIDTH: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Adds the parts, and applies the norm and the gate: out [users, WIDTH]."""
    user = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, W)
    inside = lanes < WIDTH
    total = tl.zeros([W], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + (user * PARTS + part) * WIDTH + lanes, mask=inside, other=0.0)
    centred = tl.where(inside, total - tl.sum(total, 0) / WIDTH, 0.0)
    normed = centred / tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    normed *= tl.load(weight + lanes, mask=inside, other=0.0)
    normed += tl.load(bias + lanes, mask=inside, other=0.0)
    gate = _silu(tl.load(rows + user * ROW + lanes, mask=inside, other=0.0))
    tl.store(out + user * WIDTH + lanes, normed * gate, mask=inside)


@triton.jit(do_not_specialize=["column"])
def scatter_kernel(
    source, table, column, COLUMNS: tl.constexpr, SIZE: tl.constexpr, S: tl.constexpr
):
    """Copies each user's row of source [users, SIZE bytes] to the address in a column of the
    table."""
    user = tl.program_id(0).to(tl.int64)
    address = tl.load(table + user * COLUMNS + column)
    lanes = tl.arange(0, S)
    inside = (lanes < SIZE) & (address != 0)
    target = address.to(tl.pointer_type(tl.uint8)) + lanes
    tl.store(target, tl.load(source + user * SIZE + lanes, mask=inside, other=0), mask=inside)
