"""The Triton kernels of `positions.triton`: inputs plus rows of positions after dropout, token
keys, and the gradients."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.plan_columns import SampleColumn
from freescale.kernels.draw_kernels import _derive, _draw_kept
from freescale.kernels.layer.triton_kernels import _kept

START = tl.constexpr(int(SampleColumn.START))
LENGTH = tl.constexpr(int(SampleColumn.LENGTH))
HISTORY = tl.constexpr(int(SampleColumn.HISTORY))
COLUMNS = tl.constexpr(len(SampleColumn))


# keys: a slice of a batch's keys may have any alignment
@triton.jit(do_not_specialize=["tokens", "count", "steps"], do_not_specialize_on_alignment=["keys"])
def add_positions_kernel(
    x, position, keys, samples, out, token_keys, tokens, count, steps, scale,
    layer, threshold, share,
    DROPS: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """R tokens per program. They find their samples by bisection in `steps`. keys is None without
    dropout."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    low = tl.zeros([R], tl.int32)  # the sample is in [low, high)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        after = tl.load(samples + middle * COLUMNS + START) <= row
        low = tl.where(after, middle, low)
        high = tl.where(after, high, middle)
    slot = row - tl.load(samples + low * COLUMNS + START)
    place = tl.minimum(slot, tl.load(samples + low * COLUMNS + HISTORY))
    column = tl.arange(0, W)
    inside = row < tokens
    there = inside[:, None] & (column < WIDTH)[None, :]
    own = row[:, None] * WIDTH + column[None, :]
    result = tl.load(x + own, mask=there, other=0.0).to(tl.float32) * scale
    result += tl.load(
        position + place[:, None] * WIDTH + column[None, :], mask=there, other=0.0
    ).to(tl.float32)
    if keys is not None:
        key = tl.load(keys + low, mask=inside, other=0).to(tl.uint64, bitcast=True)
        key = _derive(key, slot)
        tl.store(token_keys + row, key.to(tl.int64, bitcast=True), mask=inside)
        if DROPS:
            result = tl.where(_draw_kept(key, layer, threshold, R, W), result * share, 0.0)
    tl.store(out + own, result.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens"])
def add_encodings_kernel(
    x, position, time, places, buckets, token_keys, out, tokens, scale, layer, threshold, share,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """R tokens per program. token_keys is None without dropout."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    inside = row < tokens
    there = inside[:, None] & (column < WIDTH)[None, :]
    own = row[:, None] * WIDTH + column[None, :]
    result = tl.load(x + own, mask=there, other=0.0).to(tl.float32) * scale
    place = tl.load(places + row, mask=inside, other=0)[:, None] * WIDTH + column[None, :]
    bucket = tl.load(buckets + row, mask=inside, other=0)[:, None] * WIDTH + column[None, :]
    encoding = tl.load(position + place, mask=there, other=0.0).to(tl.float32)
    result += encoding + tl.load(time + bucket, mask=there, other=0.0).to(tl.float32)
    if token_keys is not None:
        kept = _kept(token_keys, row, tokens, layer, threshold, R, W)
        result = tl.where(kept, result * share, 0.0)
    tl.store(out + own, result.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens"])
def drop_gradient_kernel(
    grad, token_keys, out, scaled, tokens, scale, layer, threshold, share,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """out = the gradient before dropout: grad / kept share, or 0 for dropped elements. scaled =
    out * scale, unless it is None."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    there = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    place = row[:, None] * WIDTH + column[None, :]
    kept = _kept(token_keys, row, tokens, layer, threshold, R, W)
    values = tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
    result = tl.where(kept, values * share, 0.0).to(out.dtype.element_ty)
    tl.store(out + place, result, mask=there)
    if scaled is not None:
        product = (result.to(tl.float32) * scale).to(out.dtype.element_ty)
        tl.store(scaled + place, product.to(scaled.dtype.element_ty), mask=there)


@triton.jit
def sum_candidates_kernel(
    grad, samples, sums, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):
    """sums [samples, WIDTH] = the sum of the gradients of each sample's candidates."""
    number = tl.program_id(0).to(tl.int64)
    sample = samples + number * COLUMNS
    start = tl.load(sample + START).to(tl.int64)
    end = start + tl.load(sample + LENGTH)
    column = tl.arange(0, W)
    total = tl.zeros([R, W], tl.float32)
    for first in range(start + tl.load(sample + HISTORY), end, R):
        row = first + tl.arange(0, R)
        there = (row < end)[:, None] & (column < WIDTH)[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        total += tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
    tl.store(sums + number * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)


@triton.jit(do_not_specialize=["count", "last"])
def position_gradient_kernel(
    grad, samples, candidates, out, count, last,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One position per program, summed over the samples, R at a time. No token has a position above
    `last`. `candidates` [samples, WIDTH] are sums of their gradients, or None."""
    position = tl.program_id(0)
    column = tl.arange(0, W)
    total = tl.zeros([R, W], tl.float32)
    if position <= last:
        for first in range(0, count, R):
            number = first + tl.arange(0, R)
            inside = number < count
            sample = samples + number * COLUMNS
            start = tl.load(sample + START, mask=inside, other=0).to(tl.int64)
            history = tl.load(sample + HISTORY, mask=inside, other=-1)
            there = (position < history)[:, None] & (column < WIDTH)[None, :]
            place = (start + position)[:, None] * WIDTH + column[None, :]
            total += tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
            if candidates is not None:
                there = (position == history)[:, None] & (column < WIDTH)[None, :]
                place = number.to(tl.int64)[:, None] * WIDTH + column[None, :]
                total += tl.load(candidates + place, mask=there, other=0.0)
    result = tl.sum(total, 0)
    place = position.to(tl.int64) * WIDTH + column
    tl.store(out + place, result.to(out.dtype.element_ty), mask=column < WIDTH)
