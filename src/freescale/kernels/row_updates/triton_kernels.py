"""The Triton kernels of `row_updates`: clipping, and row optimizers that read and write a row once.

A program works on R rows of up to W columns, a power of two. The optimizers round like torch's CUDA
kernels, operation by operation: multiply-adds are fused where torch's are, and nowhere else (the
kernels are compiled with contraction off); divisions and roots are rounded as IEEE demands.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.row_sums.triton_kernels import _locate_rows, sum_rows


@triton.jit
def _take_gradients(
    rows, gradients, order, partial, marks, count, SORTED: tl.constexpr,
    CHUNK: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """(places in the table, gradients, mask of both, rows, mask of rows) of a program's rows.
    SORTED: `gradients` has one row for each read, and they are summed here. Marks the rows, if
    there are marks."""
    if SORTED:
        _, row, known, gradient = sum_rows(
            gradients, rows, order, partial, count, CHUNK, STEPS, UNROLL, WIDTH, R, W
        )
        columns = tl.arange(0, W)[None, :]
        place = row[:, None] * WIDTH + columns
        there = known[:, None] & (columns < WIDTH)
    else:
        place, source, there, row, known = _locate_rows(rows, count, WIDTH, R, W)
        gradient = tl.load(gradients + source, mask=there, other=0.0)
    if marks is not None:
        tl.store(marks + row, tl.full([R], 255, tl.uint8), mask=known)
    return place, gradient, there, row, known


@triton.jit(do_not_specialize=["count"])
def clip_kernel(gradients, count, limit, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.arange(0, W)[None, :]
    there = (number < count)[:, None] & (columns < WIDTH)
    at = gradients + number[:, None] * WIDTH + columns
    values = tl.load(at, mask=there, other=0.0)
    norm = tl.sqrt_rn(tl.sum(values * values, 1))
    norm = tl.where(norm < 1e-30, 1e-30, norm)  # not minimum and maximum: NaN stays NaN
    scale = tl.div_rn(tl.full([R], 1.0, tl.float32), norm) * limit
    scale = tl.where(scale > 1, 1.0, scale)
    tl.store(at, values * scale[:, None], mask=there)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows"])
def sgd_kernel(
    weight, rows, gradients, order, partial, marks, count, lr,
    SORTED: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    place, gradient, there, _, _ = _take_gradients(
        rows, gradients, order, partial, marks, count, SORTED, CHUNK, STEPS, UNROLL, WIDTH, R, W
    )
    value = tl.load(weight + place, mask=there)
    tl.store(weight + place, tl.fma(gradient, -lr, value), mask=there)


# All loads come before the first store: the compiler does not know that the tensors are distinct,
# so it cannot move a load over a store, and a row's loads would wait for each other.


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows"])
def adagrad_kernel(
    weight, total, rows, gradients, order, partial, marks, count, lr, eps, FUSED: tl.constexpr,
    SORTED: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    place, gradient, there, _, _ = _take_gradients(
        rows, gradients, order, partial, marks, count, SORTED, CHUNK, STEPS, UNROLL, WIDTH, R, W
    )
    squares = tl.load(total + place, mask=there, other=0.0)
    value = tl.load(weight + place, mask=there)
    squares = tl.fma(gradient, gradient, squares) if FUSED else squares + gradient * gradient
    tl.store(total + place, squares, mask=there)
    step = tl.div_rn(gradient, tl.sqrt_rn(squares) + eps)
    tl.store(weight + place, tl.fma(step, -lr, value), mask=there)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows"])
def rowwise_adagrad_kernel(
    weight, total, rows, gradients, order, partial, marks, count, lr, eps, inverse,
    SORTED: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """inverse = 1 / WIDTH."""
    place, gradient, there, row, known = _take_gradients(
        rows, gradients, order, partial, marks, count, SORTED, CHUNK, STEPS, UNROLL, WIDTH, R, W
    )
    squares = tl.load(total + row, mask=known, other=0.0)
    value = tl.load(weight + place, mask=there)
    squares += tl.sum(gradient * gradient, 1) * inverse
    tl.store(total + row, squares, mask=known)
    scale = tl.broadcast_to((tl.sqrt_rn(squares) + eps)[:, None], R, W)
    tl.store(weight + place, tl.fma(tl.div_rn(gradient, scale), -lr, value), mask=there)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows"])
def adam_kernel(
    weight, first, second, rows, gradients, order, partial, marks, count,
    lr, share, other_share, beta, other_beta, inverse_root, eps, SMALL: tl.constexpr,
    SORTED: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """share = 1 - beta1, other_share = 1 - share in float32; beta = beta2, other_beta = 1 - beta2;
    SMALL: share < 0.5."""
    place, gradient, there, _, _ = _take_gradients(
        rows, gradients, order, partial, marks, count, SORTED, CHUNK, STEPS, UNROLL, WIDTH, R, W
    )
    mean = tl.load(first + place, mask=there, other=0.0)
    square = tl.load(second + place, mask=there, other=0.0)
    value = tl.load(weight + place, mask=there)
    mean = (
        tl.fma(gradient - mean, share, mean)
        if SMALL
        else tl.fma(mean - gradient, other_share, gradient)
    )
    square = tl.fma(gradient * gradient, other_beta, square * beta)
    tl.store(first + place, mean, mask=there)
    tl.store(second + place, square, mask=there)
    step = tl.div_rn(mean, tl.sqrt_rn(square) * inverse_root + eps)
    tl.store(weight + place, tl.fma(step, -lr, value), mask=there)
