"""The Triton kernels of `sampled_softmax`: the loss, the gradients of outputs, those of negatives,
and the sums of each row's gradients.

Negatives of a sample or of the batch are products on the tensor cores: a program takes M tokens of
one sample, N negatives at a time, and W columns of both at a time, so that any width fits.
Negatives of a position are read by that position alone: a program takes one token, and whole rows.
Scores are computed again in backward, from the log-sum-exp and the scales that forward keeps per
token.

The gradient of a row is the sum of its entries: coefficient * output for each token that has the
row as its target or as a negative of its own, and a finished sum for each chunk of tokens that
share it as a negative. Entries are sorted by row, and added in that order. The backward of the norm
is applied once, to the finished sum. Arithmetic is in float32, except the operands of products.
Tokens and rows are 64-bit numbers.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

SMALLEST_NORM = tl.constexpr(1e-12)
# The values of a token that forward keeps.
LOG_SUM, SCALE, TARGET_SCALE, COSINE = (tl.constexpr(column) for column in range(4))
COLUMNS = tl.constexpr(4)

# Kernels are not specialised on the values and alignments of these: they change at each step.
VARYING = [
    "grad", "targets", "negatives", "log_q", "targets_log_q", "weights", "lengths", "tokens",
    "tiles", "chunks", "chunk", "weighted", "entries", "count", "steps",
]  # fmt: skip


# ---- pieces


@triton.jit
def _find_sample(lengths, sample, tokens, chunk, SHARED: tl.constexpr, BLOCK: tl.constexpr):
    """(first token, tokens, chunks of the samples before) of a sample; SHARED: all tokens are one
    sample."""
    if SHARED:
        start = tl.full([], 0, tl.int64)
        length, chunks = start + tokens, start
    else:
        before, parts = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        for first in range(0, sample, BLOCK):
            at = first + tl.arange(0, BLOCK)
            some = tl.load(lengths + at, mask=at < sample, other=0)
            before += some
            parts += (some + (chunk - 1)) // chunk
        start, chunks = tl.sum(before, 0), tl.sum(parts, 0)
        length = tl.load(lengths + sample)
    return start, length, chunks


@triton.jit
def _load_rows(table, row, there, first, WIDTH: tl.constexpr, W: tl.constexpr):
    """[R, W]: columns from `first` of rows [R], zero outside the table."""
    column = first + tl.arange(0, W)
    mask = there[:, None] & (column < WIDTH)[None, :]
    return tl.load(table + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def _invert(squares, NORMALIZE: tl.constexpr):
    """1 / norm from the sum of squares; 1 without NORMALIZE."""
    if NORMALIZE:
        return 1 / tl.maximum(tl.sqrt_rn(squares), SMALLEST_NORM)
    else:
        return tl.full(squares.shape, 1.0, tl.float32)


@triton.jit
def _load_kept(kept, token, there, COLUMN: tl.constexpr):
    return tl.load(kept + token * COLUMNS + COLUMN, mask=there, other=0.0)


@triton.jit
def _load_or(pointer, place, there, OTHER: tl.constexpr):
    """Float32 values of an optional tensor."""
    if pointer is None:
        return tl.full(place.shape, OTHER, tl.float32)
    else:
        return tl.load(pointer + place, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _score(
    outputs, rows, negatives, log_q, sample, first, token, there, goal, scale, inverse_temperature,
    NORMALIZE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores M tokens against N negatives of a sample from `first`: (logits [M, N], products before
    the temperature [M, N], scales of the negatives [N], their rows [N], mask of negatives [N]). A
    negative that is the target has a logit of -inf."""
    number = first + tl.arange(0, N)
    present = number < K
    index = tl.load(negatives + sample * K + number, mask=present, other=-1).to(tl.int64)
    products = tl.zeros([M, N], tl.float32)
    squares = tl.zeros([N], tl.float32)
    for column in range(0, WIDTH, W):
        x = _load_rows(outputs, token, there, column, WIDTH, W)
        n = _load_rows(rows, index, present, column, WIDTH, W)
        if NORMALIZE:
            squares += tl.sum(n.to(tl.float32) * n.to(tl.float32), 1)
        products = tl.dot(x.to(DTYPE), tl.trans(n.to(DTYPE)), products, input_precision=PRECISION)
    own = _invert(squares, NORMALIZE)
    if NORMALIZE:
        products = products * scale[:, None] * own[None, :]
    logits = products * inverse_temperature
    if log_q is not None:
        correction = tl.load(log_q + sample * K + number, mask=present, other=0.0)
        logits -= correction[None, :]
    absent = (goal[:, None] == index[None, :]) | (number >= K)[None, :]
    return tl.where(absent, float("-inf"), logits), products, own, index, present


# ---- negatives of a sample, or of the batch


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    outputs, rows, targets, negatives, log_q, targets_log_q, weights, lengths, losses, kept,
    tokens, tiles, inverse_temperature,
    SHARED: tl.constexpr, NORMALIZE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of M tokens: their weighted losses, and their values for backward."""
    sample = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * M
    start, length, slot = _find_sample(lengths, sample, tokens, 1, SHARED, BLOCK)
    if first < length:
        place = first + tl.arange(0, M)
        there = place < length
        token = start + place
        goal = tl.load(targets + token, mask=there, other=-1).to(tl.int64)
        product, squares, goal_squares = (
            tl.zeros([M], tl.float32), tl.zeros([M], tl.float32), tl.zeros([M], tl.float32),
        )  # fmt: skip
        for column in range(0, WIDTH, W):
            x = _load_rows(outputs, token, there, column, WIDTH, W).to(tl.float32)
            y = _load_rows(rows, goal, there, column, WIDTH, W).to(tl.float32)
            product += tl.sum(x * y, 1)
            if NORMALIZE:
                squares += tl.sum(x * x, 1)
                goal_squares += tl.sum(y * y, 1)
        scale, goal_scale = _invert(squares, NORMALIZE), _invert(goal_squares, NORMALIZE)
        cosine = product * scale * goal_scale
        own = cosine * inverse_temperature - _load_or(targets_log_q, token, there, 0.0)
        top, total = own, tl.full([M], 1.0, tl.float32)
        for k in range(0, K, N):
            logits, _, _, _, _ = _score(
                outputs, rows, negatives, log_q, sample, k, token, there, goal, scale,
                inverse_temperature, NORMALIZE, K, WIDTH, M, N, W, DTYPE, PRECISION,
            )  # fmt: skip
            highest = tl.maximum(top, tl.max(logits, 1))
            total = total * tl.exp(top - highest) + tl.sum(tl.exp(logits - highest[:, None]), 1)
            top = highest
        rest = tl.log(total)
        loss = (top - own + rest) * _load_or(weights, token, there, 1.0)
        tl.store(losses + token, loss, mask=there)
        tl.store(kept + token * COLUMNS + LOG_SUM, top + rest, mask=there)
        tl.store(kept + token * COLUMNS + SCALE, scale, mask=there)
        tl.store(kept + token * COLUMNS + TARGET_SCALE, goal_scale, mask=there)
        tl.store(kept + token * COLUMNS + COSINE, cosine, mask=there)


@triton.jit(do_not_specialize=VARYING)
def outputs_kernel(
    grad, outputs, rows, targets, negatives, log_q, weights, lengths, kept,
    grad_outputs, partial, coefficients, keys, tokens, tiles, inverse_temperature,
    SHARED: tl.constexpr, NORMALIZE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of M tokens: the gradient of their outputs, and the entry of each target's row. More
    than N negatives are added up in `partial`."""
    sample = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * M
    start, length, slot = _find_sample(lengths, sample, tokens, 1, SHARED, BLOCK)
    if first < length:
        place = first + tl.arange(0, M)
        there = place < length
        token = start + place
        goal = tl.load(targets + token, mask=there, other=-1).to(tl.int64)
        log_sum = _load_kept(kept, token, there, LOG_SUM)
        scale = _load_kept(kept, token, there, SCALE)
        goal_scale = _load_kept(kept, token, there, TARGET_SCALE)
        cosine = _load_kept(kept, token, there, COSINE)
        slope = _load_or(weights, token, there, 1.0) * tl.load(grad) * inverse_temperature
        # sums over the negatives of their shares, and of shares * products
        shares, along = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
        LAST: tl.constexpr = (K - 1) // N * N
        if LAST > 0:
            for k in range(0, LAST, N):
                logits, products, own, index, present = _score(
                    outputs, rows, negatives, log_q, sample, k, token, there, goal, scale,
                    inverse_temperature, NORMALIZE, K, WIDTH, M, N, W, DTYPE, PRECISION,
                )  # fmt: skip
                share = tl.exp(logits - log_sum[:, None])
                shares += tl.sum(share, 1)
                along += tl.sum(share * products, 1)
                scaled = (share * own[None, :]).to(DTYPE)
                for column in range(0, WIDTH, W):
                    n = _load_rows(rows, index, present, column, WIDTH, W)
                    part = tl.dot(scaled, n.to(DTYPE), input_precision=PRECISION)
                    at = column + tl.arange(0, W)
                    where = partial + token[:, None] * WIDTH + at[None, :]
                    mask = there[:, None] & (at < WIDTH)[None, :]
                    part += tl.load(where, mask=mask & (k > 0), other=0.0)
                    tl.store(where, part, mask=mask)
                tl.debug_barrier()
        logits, products, own, index, present = _score(
            outputs, rows, negatives, log_q, sample, LAST, token, there, goal, scale,
            inverse_temperature, NORMALIZE, K, WIDTH, M, N, W, DTYPE, PRECISION,
        )  # fmt: skip
        share = tl.exp(logits - log_sum[:, None])
        shares += tl.sum(share, 1)
        along += tl.sum(share * products, 1)
        scaled = (share * own[None, :]).to(DTYPE)
        for column in range(0, WIDTH, W):
            n = _load_rows(rows, index, present, column, WIDTH, W)
            total = tl.dot(scaled, n.to(DTYPE), input_precision=PRECISION)
            at = column + tl.arange(0, W)
            mask = there[:, None] & (at < WIDTH)[None, :]
            if LAST > 0:
                total += tl.load(partial + token[:, None] * WIDTH + at[None, :], mask=mask, other=0)
            y = _load_rows(rows, goal, there, column, WIDTH, W).to(tl.float32)
            total -= (shares * goal_scale)[:, None] * y
            if NORMALIZE:
                x = _load_rows(outputs, token, there, column, WIDTH, W).to(tl.float32)
                total += ((shares * cosine - along) * scale)[:, None] * x
            total *= (slope * scale)[:, None]
            where = grad_outputs + token[:, None] * WIDTH + at[None, :]
            tl.store(where, total.to(grad_outputs.dtype.element_ty), mask=mask)
        tl.store(coefficients + token, -shares * slope * scale, mask=there)
        tl.store(keys + token, goal.to(tl.int32), mask=there)


@triton.jit(do_not_specialize=VARYING)
def negatives_kernel(
    grad, outputs, rows, targets, negatives, log_q, weights, lengths, kept, sums, keys,
    tokens, chunks, chunk, inverse_temperature,
    SHARED: tl.constexpr, NORMALIZE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, W: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk of a sample's tokens: entries of N negatives' rows, V columns of them."""
    sample = (tl.program_id(0) // chunks).to(tl.int64)
    number = tl.program_id(0) % chunks
    BLOCKS: tl.constexpr = (WIDTH + V - 1) // V
    k = tl.program_id(1) // BLOCKS * N
    column = tl.program_id(1) % BLOCKS * V
    start, length, slot = _find_sample(lengths, sample, tokens, chunk, SHARED, BLOCK)
    if number * chunk < length:
        slot += number
        total = tl.zeros([N, V], tl.float32)
        for first in range(number * chunk, tl.minimum((number + 1) * chunk, length), M):
            place = first + tl.arange(0, M)
            there = place < length
            token = start + place
            goal = tl.load(targets + token, mask=there, other=-1).to(tl.int64)
            log_sum = _load_kept(kept, token, there, LOG_SUM)
            scale = _load_kept(kept, token, there, SCALE)
            logits, _, _, _, _ = _score(
                outputs, rows, negatives, log_q, sample, k, token, there, goal, scale,
                inverse_temperature, NORMALIZE, K, WIDTH, M, N, W, DTYPE, PRECISION,
            )  # fmt: skip
            factor = tl.where(there, scale * _load_or(weights, token, there, 1.0), 0.0)
            share = tl.exp(logits - log_sum[:, None]) * factor[:, None]
            x = _load_rows(outputs, token, there, column, WIDTH, V)
            total = tl.dot(tl.trans(share.to(DTYPE)), x.to(DTYPE), total, input_precision=PRECISION)
        negative = k + tl.arange(0, N)
        entry = slot * K + negative
        at = column + tl.arange(0, V)
        mask = (negative < K)[:, None] & (at < WIDTH)[None, :]
        total *= tl.load(grad) * inverse_temperature
        tl.store(sums + entry[:, None] * WIDTH + at[None, :], total, mask=mask)
        if column == 0:
            index = tl.load(negatives + sample * K + negative, mask=negative < K, other=0)
            tl.store(keys + tokens + entry, index.to(tl.int32), mask=negative < K)


# ---- negatives of a position


@triton.jit
def _score_position(
    rows, negatives, log_q, token, first, x, goal, scale, inverse_temperature,
    NORMALIZE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Scores a token against N of its negatives: (logits [N], products before the temperature [N],
    values [N, W] and scales [N] of the negatives' rows, numbers of the negatives [N], their rows
    [N])."""
    number = first + tl.arange(0, N)
    present = number < K
    index = tl.load(negatives + token * K + number, mask=present, other=-1).to(tl.int64)
    n = _load_rows(rows, index, present, 0, WIDTH, W).to(tl.float32)
    own = _invert(tl.sum(n * n, 1), NORMALIZE)
    products = tl.sum(n * x[None, :], 1) * scale * own
    logits = products * inverse_temperature
    if log_q is not None:
        logits -= tl.load(log_q + token * K + number, mask=present, other=0.0)
    logits = tl.where((index == goal) | (number >= K), float("-inf"), logits)
    return logits, products, n, own, number, index


@triton.jit(do_not_specialize=VARYING)
def position_forward_kernel(
    outputs, rows, targets, negatives, log_q, targets_log_q, weights, losses, kept,
    inverse_temperature,
    NORMALIZE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """A token: its weighted loss, and its values for backward."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, W)
    inside = column < WIDTH
    goal = tl.load(targets + token).to(tl.int64)
    x = tl.load(outputs + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(rows + goal * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    scale, goal_scale = _invert(tl.sum(x * x, 0), NORMALIZE), _invert(tl.sum(y * y, 0), NORMALIZE)
    cosine = tl.sum(x * y, 0) * scale * goal_scale
    own = cosine * inverse_temperature
    if targets_log_q is not None:
        own -= tl.load(targets_log_q + token)
    top, total = own, own * 0 + 1
    for k in range(0, K, N):
        logits, _, _, _, _, _ = _score_position(
            rows, negatives, log_q, token, k, x, goal, scale, inverse_temperature,
            NORMALIZE, K, WIDTH, N, W,
        )  # fmt: skip
        highest = tl.maximum(top, tl.max(logits, 0))
        total = total * tl.exp(top - highest) + tl.sum(tl.exp(logits - highest), 0)
        top = highest
    rest = tl.log(total)
    loss = top - own + rest
    if weights is not None:
        loss *= tl.load(weights + token).to(tl.float32)
    tl.store(losses + token, loss)
    tl.store(kept + token * COLUMNS + LOG_SUM, top + rest)
    tl.store(kept + token * COLUMNS + SCALE, scale)
    tl.store(kept + token * COLUMNS + TARGET_SCALE, goal_scale)
    tl.store(kept + token * COLUMNS + COSINE, cosine)


@triton.jit(do_not_specialize=VARYING)
def position_backward_kernel(
    grad, outputs, rows, targets, negatives, log_q, weights, kept, grad_outputs, coefficients,
    keys, inverse_temperature,
    NORMALIZE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """A token: the gradient of its output, and the K + 1 entries of its negatives' and target's
    rows."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, W)
    inside = column < WIDTH
    goal = tl.load(targets + token).to(tl.int64)
    log_sum = tl.load(kept + token * COLUMNS + LOG_SUM)
    scale = tl.load(kept + token * COLUMNS + SCALE)
    goal_scale = tl.load(kept + token * COLUMNS + TARGET_SCALE)
    cosine = tl.load(kept + token * COLUMNS + COSINE)
    slope = tl.load(grad) * inverse_temperature * scale
    if weights is not None:
        slope *= tl.load(weights + token).to(tl.float32)
    x = tl.load(outputs + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    shares, along = scale * 0, scale * 0
    total = tl.zeros([W], tl.float32)
    entry = token * (K + 1)
    for k in range(0, K, N):
        logits, products, n, own, number, index = _score_position(
            rows, negatives, log_q, token, k, x, goal, scale, inverse_temperature,
            NORMALIZE, K, WIDTH, N, W,
        )  # fmt: skip
        share = tl.exp(logits - log_sum)
        shares += tl.sum(share, 0)
        along += tl.sum(share * products, 0)
        total += tl.sum(n * (share * own)[:, None], 0)
        tl.store(coefficients + entry + number, share * slope, mask=number < K)
        tl.store(keys + entry + number, index.to(tl.int32), mask=number < K)
    y = tl.load(rows + goal * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    total -= shares * goal_scale * y
    if NORMALIZE:
        total += (shares * cosine - along) * scale * x
    where = grad_outputs + token * WIDTH + column
    tl.store(where, (total * slope).to(grad_outputs.dtype.element_ty), mask=inside)
    tl.store(coefficients + entry + K, -shares * slope)
    tl.store(keys + entry + K, goal.to(tl.int32))


# ---- gradients of rows


@triton.jit(do_not_specialize=VARYING)
def starts_kernel(ordered, starts, entries, count, steps, BLOCK: tl.constexpr):
    """starts [count + 1]: the place of the first sorted key that is not less than each row."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + entries
    for _ in range(steps):
        middle = low + (high - low) // 2
        open = low < high
        right = tl.load(ordered + middle, mask=open, other=0) < row
        low = tl.where(open & right, middle + 1, low)
        high = tl.where(open & ~right, middle, high)
    tl.store(starts + row, low, mask=row <= count)


@triton.jit
def _load_entries(
    order, coefficients, outputs, sums, at, there, weighted,
    PER: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """[E, W]: the entries at places `at` of the order. The first `weighted` entries are a
    coefficient times an output, PER entries for each output; the others are finished sums."""
    entry = tl.load(order + at, mask=there, other=0).to(tl.int64)
    scaled = there & (entry < weighted)
    factor = tl.load(coefficients + entry, mask=scaled, other=0.0)
    values = _load_rows(outputs, entry // PER, scaled, 0, WIDTH, W).to(tl.float32)
    values *= factor[:, None]
    if sums is not None:
        values += _load_rows(sums, entry - weighted, there & (entry >= weighted), 0, WIDTH, W)
    return values


@triton.jit(do_not_specialize=VARYING)
def chunks_kernel(
    ordered, order, coefficients, outputs, sums, partial, weighted,
    PER: tl.constexpr, WIDTH: tl.constexpr, E: tl.constexpr, W: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The sum of CHUNK sorted entries, if all are of one row."""
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * CHUNK
    if tl.load(ordered + start) == tl.load(ordered + start + (CHUNK - 1)):
        total = tl.zeros([E, W], tl.float32)
        for first in range(0, CHUNK, E):
            at = start + first + tl.arange(0, E)
            total += _load_entries(
                order, coefficients, outputs, sums, at, at >= 0, weighted, PER, WIDTH, W
            )
        column = tl.arange(0, W)
        tl.store(partial + chunk * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)


@triton.jit(do_not_specialize=VARYING)
def rows_kernel(
    rows, order, starts, coefficients, outputs, sums, partial, grad_rows, weighted,
    NORMALIZE: tl.constexpr, PER: tl.constexpr, WIDTH: tl.constexpr, E: tl.constexpr,
    W: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A row's gradient: the sum of its entries, whole chunks of them from `partial`."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + row).to(tl.int64)
    end = tl.load(starts + row + 1).to(tl.int64)
    chunk, last = (start + (CHUNK - 1)) // CHUNK, end // CHUNK
    many = chunk < last
    first_end = tl.where(many, chunk * CHUNK, end)
    total = tl.zeros([E, W], tl.float32)
    for first in range(start, first_end, E):
        at = first + tl.arange(0, E)
        total += _load_entries(
            order, coefficients, outputs, sums, at, at < first_end, weighted, PER, WIDTH, W
        )
    if many:
        for first in range(chunk, last, E):
            at = first + tl.arange(0, E)
            total += _load_rows(partial, at, at < last, 0, WIDTH, W)
        for first in range(last * CHUNK, end, E):
            at = first + tl.arange(0, E)
            total += _load_entries(
                order, coefficients, outputs, sums, at, at < end, weighted, PER, WIDTH, W
            )
    column = tl.arange(0, W)
    gradient = tl.sum(total, 0)
    if NORMALIZE:  # noqa: SIM102 - decided when it is compiled
        if start < end:
            own = tl.load(rows + row * WIDTH + column, mask=column < WIDTH, other=0.0)
            own = own.to(tl.float32)
            scale = _invert(tl.sum(own * own, 0), NORMALIZE)
            along = tl.sum(own * gradient, 0) * scale * scale
            gradient = (gradient - own * along) * scale
    where = grad_rows + row * WIDTH + column
    tl.store(where, gradient.to(grad_rows.dtype.element_ty), mask=column < WIDTH)
