"""The Triton kernels of `layer.triton`: layer norm, gated norm with dropout, and the backward of
SiLU followed by a split into four parts.

A program handles a tile of R tokens by W columns, where W is the width rounded up to a power of
two. In the backward kernels of the norms, a program loops over several tiles and also sums their
gradients of weight and bias. All arithmetic is in float32. Token indices have 64 bits.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.draw_kernels import _draw_kept

INLINE = tl.constexpr(not triton.knobs.runtime.interpret)  # PTX


@triton.jit
def _kept(keys, row, tokens, layer, threshold, R: tl.constexpr, W: tl.constexpr):
    """[R, W]: draw_keep_mask(derive(keys, layer), ...) for the tokens `row`, bit for bit."""
    key = tl.load(keys + row, mask=row < tokens, other=0).to(tl.uint64, bitcast=True)
    return _draw_kept(key, layer, threshold, R, W)


# ---- rows


@triton.jit
def _statistics(x, column, eps, WIDTH: tl.constexpr):
    """(mean, 1 / standard deviation) per row, each [R]. x is 0 in columns past WIDTH. The results
    for rows past the last token are never read."""
    mean = tl.sum(x, 1) / WIDTH
    apart = x - mean[:, None]
    if x.shape[1] != WIDTH:
        apart = tl.where((column < WIDTH)[None, :], apart, 0.0)
    return mean, tl.rsqrt(tl.sum(apart * apart, 1) / WIDTH + eps)


@triton.jit
def _norm_gradient(grad, normal, weight, inverse, WIDTH: tl.constexpr):
    """Gradient of the norm's input, [R, W].

    grad [R, W] is 0 in columns past WIDTH; normal [R, W] is the normalised input, finite
    everywhere; weight is [W]; inverse [R] is 1 / standard deviation.
    """
    grad = grad * weight[None, :]
    # one reduction for both sums halves the barriers
    along, level = tl.split(tl.sum(tl.join(grad * normal, grad), 1))
    along, level = along * (inverse / WIDTH), level * (inverse / WIDTH)
    return grad * inverse[:, None] - (normal * along[:, None] + level[:, None])


@triton.jit
def _sigmoid(x):
    """Flushes denormals to zero. Triton's own sigmoid preserves them, which costs eight more
    instructions."""
    if INLINE:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; "
            "add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.sigmoid(x)


@triton.jit
def _silu_slope(x, part):
    """The derivative of SiLU at x. part: the sigmoid of x."""
    return part + x * part * (1 - part)


@triton.jit(do_not_specialize=["tokens"])
def layer_norm_kernel(
    x, weight, bias, out, means, inverses, tokens, eps,
    SWISH: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """SWISH: out = x * sigmoid(norm), instead of the norm."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    there = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    place = row[:, None] * WIDTH + column[None, :]
    values = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    mean, inverse = _statistics(values, column, eps, WIDTH)
    result = (values - mean[:, None]) * inverse[:, None] * scale[None, :] + shift[None, :]
    if SWISH:
        result = values * _sigmoid(result)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=there)
    tl.store(means + row, mean, mask=row < tokens)
    tl.store(inverses + row, inverse, mask=row < tokens)


@triton.jit(do_not_specialize=["tokens", "steps"])
def layer_norm_backward_kernel(
    grad, x, weight, bias, means, inverses, grad_x, weight_parts, bias_parts, tokens, steps,
    SWISH: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """A program handles `steps` tiles in a row and stores its own sums for weight and bias."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, W)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if SWISH:
        shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([R, W], tl.float32)
    bias_sum = tl.zeros([R, W], tl.float32)
    for step in range(steps):
        row = (part * steps + step) * R + tl.arange(0, R)
        there = (row < tokens)[:, None] & (column < WIDTH)[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        slope = tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
        values = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
        mean = tl.load(means + row, mask=row < tokens, other=0.0)
        inverse = tl.load(inverses + row, mask=row < tokens, other=0.0)
        normal = (values - mean[:, None]) * inverse[:, None]
        if SWISH:
            opened = _sigmoid(normal * scale[None, :] + shift[None, :])
            own = slope * opened
            slope = own * values * (1 - opened)
            result = own + _norm_gradient(slope, normal, scale, inverse, WIDTH)
        else:
            result = _norm_gradient(slope, normal, scale, inverse, WIDTH)
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=there)
        weight_sum += slope * normal
        bias_sum += slope
    tl.store(weight_parts + part * WIDTH + column, tl.sum(weight_sum, 0), mask=column < WIDTH)
    tl.store(bias_parts + part * WIDTH + column, tl.sum(bias_sum, 0), mask=column < WIDTH)


@triton.jit(do_not_specialize=["tokens", "layer", "threshold"])
def gated_norm_kernel(
    x, gate, keys, weight, bias, out, means, inverses,
    tokens, gate_stride, eps, layer, threshold, share,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """share: 1 / probability to keep; keys: None without dropout."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    there = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    place = row[:, None] * WIDTH + column[None, :]
    values = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    opening = tl.load(
        gate + row[:, None] * gate_stride + column[None, :], mask=there, other=0.0
    ).to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    mean, inverse = _statistics(values, column, eps, WIDTH)
    result = (
        (values - mean[:, None]) * inverse[:, None] * scale[None, :] + shift[None, :]
    ) * opening
    if keys is not None:
        result = tl.where(_kept(keys, row, tokens, layer, threshold, R, W), result * share, 0.0)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=there)
    tl.store(means + row, mean, mask=row < tokens)
    tl.store(inverses + row, inverse, mask=row < tokens)


@triton.jit(do_not_specialize=["tokens", "steps", "layer", "threshold"])
def gated_norm_backward_kernel(
    grad, x, gate, keys, weight, bias, means, inverses, grad_x, grad_gate, weight_parts, bias_parts,
    tokens, steps, gate_stride, layer, threshold, share,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """A program handles `steps` tiles in a row and stores its own sums for weight and bias."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, W)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([R, W], tl.float32)
    bias_sum = tl.zeros([R, W], tl.float32)
    for step in range(steps):
        row = (part * steps + step) * R + tl.arange(0, R)
        there = (row < tokens)[:, None] & (column < WIDTH)[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        slope = tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
        values = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
        opening = tl.load(
            gate + row[:, None] * gate_stride + column[None, :], mask=there, other=0.0
        ).to(tl.float32)
        mean = tl.load(means + row, mask=row < tokens, other=0.0)
        inverse = tl.load(inverses + row, mask=row < tokens, other=0.0)
        if keys is not None:
            slope = tl.where(_kept(keys, row, tokens, layer, threshold, R, W), slope * share, 0.0)
        normal = (values - mean[:, None]) * inverse[:, None]
        opened = slope * (normal * scale[None, :] + shift[None, :])
        tl.store(grad_gate + place, opened.to(grad_gate.dtype.element_ty), mask=there)
        slope *= opening
        tl.store(
            grad_x + place,
            _norm_gradient(slope, normal, scale, inverse, WIDTH).to(grad_x.dtype.element_ty),
            mask=there,
        )
        weight_sum += slope * normal
        bias_sum += slope
    tl.store(weight_parts + part * WIDTH + column, tl.sum(weight_sum, 0), mask=column < WIDTH)
    tl.store(bias_parts + part * WIDTH + column, tl.sum(bias_sum, 0), mask=column < WIDTH)


@triton.jit(do_not_specialize=["tokens", "layer", "threshold"])
def drop_kernel(
    x, sign, keys, out, tokens, layer, threshold, share,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """x where `sign` is positive, if it is given, with dropout. Forward and backward."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    there = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    place = row[:, None] * WIDTH + column[None, :]
    values = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    if sign is not None:
        values = tl.where(tl.load(sign + place, mask=there, other=0.0) > 0, values, 0.0)
    if keys is not None:
        values = tl.where(_kept(keys, row, tokens, layer, threshold, R, W), values * share, 0.0)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=there)


# ---- SiLU


@triton.jit
def _silu_gradient(
    grad, x, out, row, column, tokens, total: tl.constexpr, first: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    """Computes `width` columns of out, from column `first`. grad is [tokens, width]; x and out are
    [tokens, total]."""
    there = (row < tokens)[:, None] & (column < width)[None, :]
    place = row[:, None] * total + first + column[None, :]
    values = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    slope = tl.load(grad + row[:, None] * width + column[None, :], mask=there, other=0.0).to(
        tl.float32
    )
    result = slope * _silu_slope(values, _sigmoid(values))
    tl.store(out + place, result.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens"])
def silu_backward_kernel(
    first_grad, second_grad, third_grad, fourth_grad, x, out, tokens,
    FIRST_WIDTH: tl.constexpr, SECOND_WIDTH: tl.constexpr,
    THIRD_WIDTH: tl.constexpr, FOURTH_WIDTH: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid (row block, column block): R tokens by C columns of one of the four parts. Column blocks
    are numbered through all parts, and none straddles two."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    block = tl.program_id(1)
    second_start: tl.constexpr = FIRST_WIDTH
    third_start: tl.constexpr = second_start + SECOND_WIDTH
    fourth_start: tl.constexpr = third_start + THIRD_WIDTH
    total: tl.constexpr = fourth_start + FOURTH_WIDTH
    second: tl.constexpr = (FIRST_WIDTH + C - 1) // C
    third: tl.constexpr = second + (SECOND_WIDTH + C - 1) // C
    fourth: tl.constexpr = third + (THIRD_WIDTH + C - 1) // C
    column = tl.arange(0, C)
    if block < second:
        _silu_gradient(first_grad, x, out, row, block * C + column, tokens, total, 0, FIRST_WIDTH)
    elif block < third:
        _silu_gradient(
            second_grad, x, out, row, (block - second) * C + column, tokens, total, second_start,
            SECOND_WIDTH,
        )  # fmt: skip
    elif block < fourth:
        _silu_gradient(
            third_grad, x, out, row, (block - third) * C + column, tokens, total, third_start,
            THIRD_WIDTH,
        )  # fmt: skip
    else:
        _silu_gradient(
            fourth_grad, x, out, row, (block - fourth) * C + column, tokens, total, fourth_start,
            FOURTH_WIDTH,
        )  # fmt: skip
