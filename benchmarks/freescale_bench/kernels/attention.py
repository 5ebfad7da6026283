"""Attention, forward and backward, over head widths, lengths and biases."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from freescale.kernels.attention import triton as triton_attention
from freescale.kernels.attention import triton_plan as triton_attention_plan
from freescale_bench.kernels.measure import Bench, Call

HEADS, BUCKETS = 4, 128
WAYS = ("forward", "backward")


def measure_attention(bench: Bench) -> dict[str, float]:
    """Measures TFLOP/s for equal and for log-normal lengths, milliseconds of wide heads, and the
    slow-down by biases."""
    batches = {
        "full": np.array(bench.size["long"]),
        "log-normal": bench.lengths(bench.size["samples"]),
    }
    figures = {}
    for width in bench.size["head_widths"]:
        for name, lengths in batches.items():
            for way, row in zip(WAYS, _measure_attended(bench, name, lengths, width), strict=True):
                figures[f"attention {way}, {name}, {width} wide, TFLOP/s"] = row["rate"]
        for way in WAYS:
            full, jagged = (
                figures[f"attention {way}, {name}, {width} wide, TFLOP/s"]
                for name in ("full", "log-normal")
            )
            figures[f"attention {way}, {width} wide, log-normal % of full"] = 100 * jagged / full
    return figures | _measure_wide(bench) | _measure_biased(bench)


def _measure_wide(bench: Bench) -> dict[str, float]:
    """Measures the two shapes with figures published by NVIDIA: 32 samples, equally long or
    jagged."""
    width, (fixed, cap) = bench.size["wide"], bench.size["wide_lengths"]
    random = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, cap + 1) ** 1.2  # Zipf's law over lengths in random order
    jagged = random.choice(
        random.permutation(np.arange(1, cap + 1)), bench.size["line"] * 2, p=weights / weights.sum()
    )
    figures = {}
    for name, lengths in (("fixed", np.full(len(jagged), fixed)), ("Zipf", jagged)):
        for way, row in zip(WAYS, _measure_attended(bench, name, lengths, width), strict=True):
            figures[f"attention {way}, {name}, wide, ms"] = row["ms"]["median"]
            figures[f"attention {way}, {name}, wide, TFLOP/s"] = row["rate"]
    return figures


def _measure_biased(bench: Bench) -> dict[str, float]:
    """Time with position and time biases, over the time without."""
    lengths = np.full(bench.size["line"] * 2, bench.size["wide_lengths"][1])
    figures = {}
    for width in bench.size["head_widths"]:
        plain, biased = (
            _measure_attended(bench, "equal", lengths, width, biases) for biases in (False, True)
        )
        for way, without, with_biases in zip(WAYS, plain, biased, strict=True):
            figures[f"attention {way}, {width} wide, biases, times without"] = (
                with_biases["ms"]["median"] / without["ms"]["median"]
            )
    return figures


def _measure_attended(
    bench: Bench, name: str, lengths: np.ndarray, width: int, biases: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rows of forward and backward."""
    tokens = int(lengths.sum())
    q, k, v = (
        bench.draw(tokens, HEADS, width, dtype=bench.narrow).requires_grad_() for _ in range(3)
    )
    weight = bench.draw(tokens, HEADS, width, dtype=bench.narrow)
    there = torch.from_numpy(lengths).to(bench.device)
    leaves, of_biases = [q, k, v], {}
    timestamps = None
    if biases:
        of_biases = {
            "position_bias": (0.1 * bench.draw(int(lengths.max()) + 1)).requires_grad_(),
            "time_bias": (0.1 * bench.draw(BUCKETS + 1)).requires_grad_(),
        }
        leaves += of_biases.values()
        timestamps = torch.randint(0, 3000, (tokens,), device=bench.device).cumsum(0)
    plan = triton_attention_plan.plan_attention(
        there, HEADS, timestamps=timestamps, buckets=BUCKETS if biases else 0, distances=biases
    )
    shared: dict[str, Any] = {
        "scale_length": bench.size["cap"],
        "alpha": width**-0.5,
        "timestamps": timestamps,
        "plan": plan,
        **of_biases,
    }
    work = 4 * HEADS * width * float((lengths.astype(float) ** 2).sum()) / 2 / 1e12
    label = f"{name}, {len(lengths)} samples, {HEADS} heads of {width}{', biases' * biases}"
    ours: Call = lambda: triton_attention.hstu_attention(q, k, v, there, **shared)  # noqa: E731
    out = ours()
    with torch.no_grad():
        forward = bench.measure("attention", f"attention forward, {label}", ours, teraflops=work)
    grads: Call = lambda: torch.autograd.grad(out, leaves, weight, retain_graph=True)  # noqa: E731
    backward = bench.measure(
        "attention", f"attention backward, {label}", grads, teraflops=2.5 * work
    )
    return forward, backward
