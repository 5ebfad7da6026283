"""The draws of `freescale.random` in Triton, in unsigned 64-bit arithmetic."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # the constants of freescale.random
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@triton.jit
def _derive(key, counter):
    return _mix(key * GOLDEN + counter.to(tl.uint64) + 1)


@triton.jit
def _draw_kept(key, layer, threshold, R: tl.constexpr, W: tl.constexpr):
    """[R, W], from keys [R]. Each hash gives four 16-bit draws, one per column."""
    return _draw_quads(_derive(key, layer), tl.arange(0, W // 4), threshold, R, W)


@triton.jit
def _draw_quads(key, quad, threshold, R: tl.constexpr, W: tl.constexpr):
    """[R, W], from keys [R] and the numbers [W / 4] of four columns each."""
    draws = _derive(key[:, None], quad[None, :])
    shifts = (16 * tl.arange(0, 4)).to(tl.uint64)
    draws = (draws[:, :, None] >> shifts[None, None, :]).to(tl.uint16).to(tl.int16, bitcast=True)
    return tl.reshape(draws < threshold, [R, W])
