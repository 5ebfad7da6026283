"""The other kernels of a layer, and a whole HSTU layer: forward, backward and peak memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.attention import plan as attention_plan
from freescale.kernels.attention import triton_plan as triton_attention_plan
from freescale.kernels.layer import reference as layer
from freescale.kernels.layer import triton as triton_layer
from freescale.models.hstu_layer import HSTULayer
from freescale.random import derive
from freescale_bench.kernels.measure import Bench, Call

DROPOUT = 0.2


def measure_pieces(bench: Bench) -> dict[str, float]:
    """Measures the norms and SiLU of a layer, under autocast as in training."""
    width, narrow = bench.size["width"], bench.narrow
    tokens = int(bench.lengths(bench.size["layer"]).sum())
    label, size = f"{tokens:,} x {width}", tokens * width / 1e9
    weight, bias = (bench.draw(width).requires_grad_() for _ in range(2))
    keys = derive(0, torch.arange(tokens, device=bench.device))
    x = bench.draw(tokens, width).requires_grad_()
    attended, slope = (
        bench.draw(tokens, width, dtype=narrow).requires_grad_(),
        bench.draw(tokens, width, dtype=narrow),
    )
    projected = bench.draw(tokens, 4 * width, dtype=narrow).requires_grad_()
    gate = projected.detach()[:, :width].requires_grad_()
    drop = {"keys": keys, "stream": 1, "keep": 1 - DROPOUT}

    def one(
        name: str,
        call: Callable[[Any], Any],
        leaves: list[Tensor],
        slopes: list[Tensor],
        forward: float,
        backward: float,
    ) -> None:
        def ours_or(module: Any) -> Any:
            with torch.autocast(
                bench.device.type, torch.bfloat16, enabled=bench.device.type == "cuda"
            ):
                return call(module)

        with torch.no_grad():
            both = [lambda m=m: ours_or(m) for m in (triton_layer, layer)]
            bench.measure("pieces", f"{name}, {label}", *both, gigabytes=forward * size)
        outputs = [ours_or(module) for module in (triton_layer, layer)]
        back = [
            lambda o=o: torch.autograd.grad(o, leaves, slopes, retain_graph=True) for o in outputs
        ]
        bench.measure("pieces", f"{name} backward, {label}", *back, gigabytes=backward * size)

    half = projected.element_size()  # bytes per activation; x and its gradient are float32
    normed = lambda m: [m.layer_norm(x, weight, bias, 1e-6, narrow)]  # noqa: E731
    one("layer norm", normed, [x, weight, bias], [slope], 4 + half, 8 + half)
    gated = lambda m: [m.gated_norm(attended, gate, weight, bias, 1e-6, narrow, **drop)]  # noqa: E731
    one("gated norm, dropout", gated, [attended, gate, weight, bias], [slope], 3 * half, 5 * half)
    split = lambda m: list(m.silu_split(projected, [width] * 4))  # noqa: E731
    one("SiLU and split", split, [projected], [slope] * 4, 8 * half, 12 * half)
    return {}


def measure_layers(bench: Bench) -> dict[str, float]:
    """Measures a whole layer, forward and backward, in bf16. Plain attention stores its score
    tiles, ours does not."""
    lengths, figures = bench.lengths(bench.size["layer"]), {}
    for name, dropout in (("", 0.0), (", dropout", DROPOUT)):
        ours, tokens = _step(bench, lengths, triton_attention_plan.plan_attention, dropout)
        # plain torch takes many seconds: once is enough
        plain = (
            _step(bench, lengths, attention_plan.plan_attention, dropout)[0]
            if not dropout
            else None
        )
        row = bench.measure(
            "layer", f"HSTU layer forward + backward{name}, {tokens:,} tokens", ours, plain
        )
        if plain is not None:
            figures["layer, times faster"] = row["faster"]
    return figures | (_measure_memory(bench) if bench.device.type == "cuda" else {})


def _step(
    bench: Bench, lengths: np.ndarray, planner: Callable[..., Any], dropout: float
) -> tuple[Call, int]:
    width, heads = bench.size["width"], bench.size["heads"]
    there = torch.from_numpy(lengths).to(bench.device)
    return make_layer_step(
        there, planner(there, heads), width, heads, bench.size["cap"], dropout
    ), int(lengths.sum())


def make_layer_step(
    lengths: Tensor, plan: Any, width: int, heads: int, cap: int, dropout: float = 0.0
) -> Call:
    """Returns a function that runs a layer forward and backward over samples of `lengths`
    [samples], at most `cap`, on their device."""
    device = lengths.device
    one = HSTULayer(
        number=0, width=width, heads=heads, d_qk=width // heads, d_v=width // heads,
        max_length=cap, dropout=dropout, position_bias=False, time_bias=False,
        num_time_buckets=128,
    ).to(device)  # fmt: skip
    x = torch.randn(int(lengths.sum()), width, device=device).requires_grad_()
    keys = derive(0, torch.arange(x.shape[0], device=device)) if dropout else None

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = one(x, lengths, keys, None, None, plan)
        out.float().square().sum().backward()
        x.grad = None
        one.zero_grad()

    return step


def _measure_memory(bench: Bench) -> dict[str, float]:
    """Measures bytes per token at two lengths: equal if memory is linear in tokens."""
    cap, peaks = bench.size["cap"], []
    for length in (cap // 4, cap):
        step, tokens = _step(
            bench,
            np.full(bench.size["line"], length),
            triton_attention_plan.plan_attention,
            DROPOUT,
        )
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated() - before) / tokens)
        bench.add(
            {
                "group": "layer",
                "case": f"peak memory, samples of {length:,}",
                "rate": peaks[-1],
                "unit": "B/token",
            }
        )
    return {"layer, memory per token, longest over a quarter of it": peaks[1] / peaks[0]}
