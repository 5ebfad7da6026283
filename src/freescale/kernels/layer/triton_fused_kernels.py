"""The Triton kernels of `layer.triton_fused`: residual sum and norm, SiLU, the gated norm from the
gate before its SiLU, and their gradients.

A program works on R tokens of up to W columns, a power of two, at a time. In the backward kernels
it works on a whole part of the tokens, `steps` times R, and writes the part's sums over tokens to
its own row of `parts` [parts, SUMS], each sum at its columns. One reduction over the parts then
gives the gradients of all vectors of the layer. All arithmetic is in float32. Token indices have 64
bits.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.layer.triton_kernels import (
    _kept,
    _norm_gradient,
    _sigmoid,
    _silu_slope,
    _statistics,
)

PART = tl.constexpr(1 << 21)  # as in layer.reference


@triton.jit
def _load_vector(vector, column, WIDTH: tl.constexpr):
    return tl.load(vector + column, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _store_sum(parts, column, total, SUMS: tl.constexpr, AT: tl.constexpr, WIDTH: tl.constexpr):
    """Stores total [W] of this program's part at the columns from AT."""
    row = parts + tl.program_id(0).to(tl.int64) * SUMS
    tl.store(row + AT + column, total, mask=column < WIDTH)


# ---- residual sum and norm


@triton.jit(do_not_specialize=["tokens"])
def add_norm_kernel(
    x, added, added_bias, weight, bias, total, out, means, inverses, tokens, eps,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """total = x + added + added_bias, or x itself if `added` is None; out = its norm. Without `out`
    only the sum."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    there = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    place = row[:, None] * WIDTH + column[None, :]
    values = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    if added is not None:
        values += tl.load(added + place, mask=there, other=0.0).to(tl.float32)
        if added_bias is not None:
            values += _load_vector(added_bias, column, WIDTH)[None, :]
        tl.store(total + place, values.to(total.dtype.element_ty), mask=there)
        # the norm sees the stored values, as in backward
        values = values.to(total.dtype.element_ty).to(tl.float32)
    if out is not None:
        mean, inverse = _statistics(values, column, eps, WIDTH)
        scale = _load_vector(weight, column, WIDTH)
        shift = _load_vector(bias, column, WIDTH)
        result = (values - mean[:, None]) * inverse[:, None] * scale[None, :] + shift[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=there)
        tl.store(means + row, mean, mask=row < tokens)
        tl.store(inverses + row, inverse, mask=row < tokens)


@triton.jit(do_not_specialize=["tokens", "steps"])
def add_norm_backward_kernel(
    grad, above, x, weight, means, inverses, grad_x, grad_added, parts, tokens, steps,
    ADDED: tl.constexpr, SUMS: tl.constexpr, WEIGHT_AT: tl.constexpr, BIAS_AT: tl.constexpr,
    ADDED_AT: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """grad: of the norm's output, or None without a norm; above: of the sum, from later layers.
    grad_x is None if it equals `above`; grad_added is a copy of it in another dtype."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, W)
    added_sum = tl.zeros([R, W], tl.float32)
    weight_sum = tl.zeros([R, W], tl.float32)
    bias_sum = tl.zeros([R, W], tl.float32)
    if grad is not None:
        scale = _load_vector(weight, column, WIDTH)
    for step in range(steps):
        row = (part * steps + step) * R + tl.arange(0, R)
        there = (row < tokens)[:, None] & (column < WIDTH)[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        result = tl.load(above + place, mask=there, other=0.0).to(tl.float32)
        if grad is not None:
            slope = tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
            values = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
            mean = tl.load(means + row, mask=row < tokens, other=0.0)
            inverse = tl.load(inverses + row, mask=row < tokens, other=0.0)
            normal = (values - mean[:, None]) * inverse[:, None]
            weight_sum += slope * normal
            bias_sum += slope
            result += _norm_gradient(slope, normal, scale, inverse, WIDTH)
        if grad_x is not None:
            tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=there)
        if grad_added is not None:
            tl.store(grad_added + place, result.to(grad_added.dtype.element_ty), mask=there)
        if ADDED:
            added_sum += result
    if grad is not None:
        _store_sum(parts, column, tl.sum(weight_sum, 0), SUMS, WEIGHT_AT, WIDTH)
        _store_sum(parts, column, tl.sum(bias_sum, 0), SUMS, BIAS_AT, WIDTH)
    if ADDED:
        _store_sum(parts, column, tl.sum(added_sum, 0), SUMS, ADDED_AT, WIDTH)


# ---- SiLU of values, queries and keys; that of the gate is in the gated norm


@triton.jit(do_not_specialize=["tokens"])
def silu_kernel(
    x, out, tokens, FIRST: tl.constexpr, TOTAL: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """out [tokens, TOTAL - FIRST] = SiLU of the columns from FIRST of x [tokens, TOTAL]. Programs
    (r, c): R tokens, C columns."""
    width: tl.constexpr = TOTAL - FIRST
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    there = (row < tokens)[:, None] & (column < width)[None, :]
    values = tl.load(x + row[:, None] * TOTAL + FIRST + column[None, :], mask=there, other=0.0).to(
        tl.float32
    )
    result = values * _sigmoid(values)
    place = row[:, None] * width + column[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def _silu_gradient(
    grad, x, out, parts, column, tokens, steps,
    SUMS: tl.constexpr, AT: tl.constexpr, TOTAL: tl.constexpr,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """grad [tokens, WIDTH] belongs to the columns from FIRST of x and out [tokens, TOTAL]."""
    part = tl.program_id(0).to(tl.int64)
    total = tl.zeros([R, C], tl.float32)
    for step in range(steps):
        row = (part * steps + step) * R + tl.arange(0, R)
        there = (row < tokens)[:, None] & (column < WIDTH)[None, :]
        place = row[:, None] * TOTAL + FIRST + column[None, :]
        values = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
        result = tl.load(grad + row[:, None] * WIDTH + column[None, :], mask=there, other=0.0)
        result = result.to(tl.float32) * _silu_slope(values, _sigmoid(values))
        tl.store(out + place, result.to(out.dtype.element_ty), mask=there)
        total += result
    _store_sum(parts, column, tl.sum(total, 0), SUMS, AT + FIRST, WIDTH)


@triton.jit(do_not_specialize=["tokens", "steps"])
def silu_backward_kernel(
    first_grad, second_grad, third_grad, x, out, parts, tokens, steps,
    SUMS: tl.constexpr, AT: tl.constexpr, FIRST: tl.constexpr,
    FIRST_WIDTH: tl.constexpr, SECOND_WIDTH: tl.constexpr, THIRD_WIDTH: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Programs (p, c): a part of the tokens, C columns of one of the three pieces after the FIRST
    columns of x. Blocks of columns are numbered piece by piece."""
    block = tl.program_id(1)
    second_start: tl.constexpr = FIRST + FIRST_WIDTH
    third_start: tl.constexpr = second_start + SECOND_WIDTH
    total: tl.constexpr = third_start + THIRD_WIDTH
    second: tl.constexpr = (FIRST_WIDTH + C - 1) // C
    third: tl.constexpr = second + (SECOND_WIDTH + C - 1) // C
    column = tl.arange(0, C)
    if block < second:
        _silu_gradient(
            first_grad, x, out, parts, block * C + column, tokens, steps,
            SUMS, AT, total, FIRST, FIRST_WIDTH, R, C,
        )  # fmt: skip
    elif block < third:
        _silu_gradient(
            second_grad, x, out, parts, (block - second) * C + column, tokens, steps,
            SUMS, AT, total, second_start, SECOND_WIDTH, R, C,
        )  # fmt: skip
    else:
        _silu_gradient(
            third_grad, x, out, parts, (block - third) * C + column, tokens, steps,
            SUMS, AT, total, third_start, THIRD_WIDTH, R, C,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "steps"])
def column_sums_kernel(
    x, parts, tokens, steps, SUMS: tl.constexpr, AT: tl.constexpr, FIRST: tl.constexpr,
    TOTAL: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sums of the columns from FIRST of x [tokens, TOTAL]. Programs (p, c): a part of the tokens, C
    columns."""
    part = tl.program_id(0).to(tl.int64)
    column = FIRST + tl.program_id(1) * C + tl.arange(0, C)
    total = tl.zeros([R, C], tl.float32)
    for step in range(steps):
        row = (part * steps + step) * R + tl.arange(0, R)
        there = (row < tokens)[:, None] & (column < TOTAL)[None, :]
        place = row[:, None] * TOTAL + column[None, :]
        total += tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    _store_sum(parts, column, tl.sum(total, 0), SUMS, AT, TOTAL)


# ---- gated norm


@triton.jit
def _drop(values, keys, row, tokens, layer, threshold, share, R: tl.constexpr, W: tl.constexpr):
    if keys is not None:
        kept = _kept(keys, row, tokens, layer, threshold, R, W)
        values = tl.where(kept, values * share, 0.0)
    return values


@triton.jit(do_not_specialize=["tokens", "layer", "threshold"])
def gate_kernel(
    x, gate, keys, weight, bias, out, means, inverses, tokens, eps, layer, threshold, share,
    WIDE: tl.constexpr, TOTAL: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """out = norm(x) * SiLU(gate) after dropout, with share = 1 / kept share; if WIDE, [tokens, 3 *
    WIDTH], behind SiLU(gate) and x. gate is the first columns of [tokens, TOTAL]. keys is None
    without dropout."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    there = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    place = row[:, None] * WIDTH + column[None, :]
    values = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    opening = tl.load(gate + row[:, None] * TOTAL + column[None, :], mask=there, other=0.0)
    opening = opening.to(tl.float32)
    scale = _load_vector(weight, column, WIDTH)
    shift = _load_vector(bias, column, WIDTH)
    mean, inverse = _statistics(values, column, eps, WIDTH)
    result = (values - mean[:, None]) * inverse[:, None] * scale[None, :] + shift[None, :]
    opened = opening * _sigmoid(opening)
    result *= opened
    if WIDE:
        place = row[:, None] * (3 * WIDTH) + column[None, :]
        opened = _drop(opened, keys, row, tokens, layer, threshold, share, R, W)
        tl.store(out + place, opened.to(out.dtype.element_ty), mask=there)
        values = _drop(values, keys, row, tokens, layer + PART, threshold, share, R, W)
        tl.store(out + place + WIDTH, values.to(out.dtype.element_ty), mask=there)
        place += 2 * WIDTH
        layer += 2 * PART
    result = _drop(result, keys, row, tokens, layer, threshold, share, R, W)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=there)
    tl.store(means + row, mean, mask=row < tokens)
    tl.store(inverses + row, inverse, mask=row < tokens)


@triton.jit(do_not_specialize=["tokens", "steps", "layer", "threshold"])
def gate_backward_kernel(
    grad, x, gate, keys, weight, bias, means, inverses, grad_x, grad_gate, parts,
    tokens, steps, layer, threshold, share,
    SUMS: tl.constexpr, WEIGHT_AT: tl.constexpr, BIAS_AT: tl.constexpr, GATE_AT: tl.constexpr,
    WIDE: tl.constexpr, TOTAL: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """grad_gate is the first columns of [tokens, TOTAL], like gate. grad is like the `out` of
    `gate_kernel`."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, W)
    scale = _load_vector(weight, column, WIDTH)
    shift = _load_vector(bias, column, WIDTH)
    weight_sum = tl.zeros([R, W], tl.float32)
    bias_sum = tl.zeros([R, W], tl.float32)
    gate_sum = tl.zeros([R, W], tl.float32)
    for step in range(steps):
        row = (part * steps + step) * R + tl.arange(0, R)
        there = (row < tokens)[:, None] & (column < WIDTH)[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        into = row[:, None] * TOTAL + column[None, :]
        above = row[:, None] * (3 * WIDTH) + column[None, :] if WIDE else place
        last: tl.constexpr = 2 if WIDE else 0  # the piece of grad that belongs to the product
        slope = tl.load(grad + above + last * WIDTH, mask=there, other=0.0).to(tl.float32)
        values = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
        opening = tl.load(gate + into, mask=there, other=0.0).to(tl.float32)
        mean = tl.load(means + row, mask=row < tokens, other=0.0)
        inverse = tl.load(inverses + row, mask=row < tokens, other=0.0)
        slope = _drop(slope, keys, row, tokens, layer + last * PART, threshold, share, R, W)
        normal = (values - mean[:, None]) * inverse[:, None]
        opened_part = _sigmoid(opening)
        opened = slope * (normal * scale[None, :] + shift[None, :])
        if WIDE:
            own = tl.load(grad + above, mask=there, other=0.0).to(tl.float32)
            opened += _drop(own, keys, row, tokens, layer, threshold, share, R, W)
        opened *= _silu_slope(opening, opened_part)
        tl.store(grad_gate + into, opened.to(grad_gate.dtype.element_ty), mask=there)
        slope *= opening * opened_part
        result = _norm_gradient(slope, normal, scale, inverse, WIDTH)
        if WIDE:
            own = tl.load(grad + above + WIDTH, mask=there, other=0.0).to(tl.float32)
            result += _drop(own, keys, row, tokens, layer + PART, threshold, share, R, W)
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=there)
        weight_sum += slope * normal
        bias_sum += slope
        gate_sum += opened
    _store_sum(parts, column, tl.sum(weight_sum, 0), SUMS, WEIGHT_AT, WIDTH)
    _store_sum(parts, column, tl.sum(bias_sum, 0), SUMS, BIAS_AT, WIDTH)
    _store_sum(parts, column, tl.sum(gate_sum, 0), SUMS, GATE_AT, WIDTH)
