"""Counts the operations of a training step of HSTU or SASRec, without rows and the head."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def count_flops(
    lengths: NDArray[np.int64], width: int, layers: int, heads: int, matrices: int = 5
) -> float:
    """Returns the operations of forward and backward over histories of these lengths. `matrices`:
    square ones of a layer; SASRec has 6.

    Attention counts the lower triangle, and its backward as 2.5 times its forward. Matrix products
    count their backward twice.
    """
    inner = width // heads * heads
    products = 2.0 * lengths * width * matrices * inner
    pairs = lengths * (lengths + 1) / 2.0
    attention = 4.0 * pairs * inner
    return float(layers * (3 * products + 3.5 * attention).sum())


def count_flops_as_nvidia(lengths: NDArray[np.int64], width: int, layers: int, heads: int) -> float:
    """Returns the same by the formula of NVIDIA's recsys-examples: half the square for attention,
    plus the gate and the residual sum."""
    inner = width // heads * heads
    products = 2.0 * lengths * width * 4 * inner + 2.0 * lengths * inner * width
    attention = 2.0 * inner * lengths.astype(np.float64) ** 2
    others = 2.0 * lengths * inner + 1.0 * lengths * heads * width
    return float(layers * (3 * products + 3.5 * attention + others).sum())


def count_flops_as_mlperf(lengths: NDArray[np.int64], width: int, layers: int, heads: int) -> float:
    """Returns the operations of samples of these lengths, all tokens included, by the formula of
    MLPerf's dlrm_v4_hstu: wide layers, half the square for attention, 3.5 times forward for
    attention and 3 times for products. 315.7 GFLOP a sample of 4,096 tokens at its sizes."""
    each, tokens = width // heads, lengths.astype(np.float64)
    attention = 3.5 * 2 * (tokens**2 / 2) * heads * (each + each)
    projection = 3 * 2 * tokens * width * heads * (2 * each + 2 * each)
    output = 3 * 2 * tokens * (3 * heads * each) * width
    return float(layers * (attention + projection + output).sum())
