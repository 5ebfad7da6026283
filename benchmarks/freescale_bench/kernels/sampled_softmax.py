"""The sampled softmax of Retrieval, with and without gradients, for each kind of negatives."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from freescale.kernels.softmax import reference, triton
from freescale.kernels.softmax.reference import Negatives
from freescale_bench.kernels.measure import Bench

# (samples, events per sample, width, rows that a step reads)
SHAPES = {
    "cuda": ((256, 108, 64, 50_000), (64, 679, 256, 40_000), (16, 4358, 512, 60_000),
             (32, 3786, 1024, 100_000)),
    "cpu": ((2, 5, 16, 20),),
}  # fmt: skip
NEGATIVES = {"cuda": 128, "cpu": 3}


def measure_sampled_softmax(bench: Bench) -> dict[str, float]:
    for samples, events, width, count in SHAPES[bench.device.type]:
        for per in ("sample", "position", "batch"):
            _measure(bench, samples, events, width, count, per)
    return {}


def _measure(
    bench: Bench, samples: int, events: int, width: int, count: int, per: reference.Per
) -> None:
    k, tokens, device = NEGATIVES[bench.device.type], samples * events, bench.device
    shape = {"sample": (samples, k), "position": (tokens, k), "batch": (k,)}[per]
    lengths = torch.full((samples,), events)
    options: dict[str, Any] = {"temperature": 0.05, "normalize": True, "host_lengths": lengths}
    outputs = bench.draw(tokens, width, dtype=bench.narrow).requires_grad_()
    rows = bench.draw(count, width).requires_grad_()
    inputs = (
        outputs,
        rows,
        torch.randint(0, count, (tokens,), device=device),
        Negatives(torch.randint(0, count, shape, device=device), per),
        lengths.to(device),
    )

    def train(module: Any) -> None:
        torch.autograd.grad(module.sampled_softmax(*inputs, **options), (outputs, rows))

    def predict(module: Any) -> None:
        with torch.no_grad():
            module.sampled_softmax(*inputs, **options)

    label = f"{tokens:,} x {k} negatives per {per}, width {width:,}"
    flops = 2 * tokens * k * width / 1e12
    for name, call, products in (("forward", predict, 1), ("forward and backward", train, 3)):
        bench.measure(
            "sampled softmax",
            f"{name}, {label}",
            partial(call, triton),
            # with negatives per position plain torch takes seconds
            None if per == "position" and tokens > 10_000 else partial(call, reference),
            teraflops=products * flops,
        )
