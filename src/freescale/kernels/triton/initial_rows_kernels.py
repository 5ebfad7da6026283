"""The Triton kernel of `initial_rows`: the draws of freescale.random, in one pass."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # the constants of freescale.random
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)
TURN = tl.constexpr(6.283185307179586)


@triton.jit
def _derive(key, counter):
    x = key * GOLDEN + counter + 1
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["count", "std"])
def draw_kernel(ids, seeds, out, count, std, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """out[i]: the row of ids[i]. A program draws R rows of up to W columns. seeds [1]."""
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    id = tl.load(ids + number, mask=number < count, other=0).to(tl.uint64, bitcast=True)
    seed = tl.load(seeds).to(tl.uint64, bitcast=True)
    column = tl.arange(0, W)
    key = _derive(_derive(seed, id)[:, None], column.to(tl.uint64)[None, :])
    first = ((key >> 40).to(tl.float32) + 0.5) * (2.0**-24)  # 24 bits: exact, and never 0
    second = (key & 0xFFFFFFFF).to(tl.float32) * (2.0**-32)
    value = tl.sqrt_rn(-2.0 * tl.log(first)) * tl.cos(second * TURN)
    there = (number < count)[:, None] & (column < WIDTH)[None, :]
    tl.store(out + number[:, None] * WIDTH + column[None, :], value * std, mask=there)
