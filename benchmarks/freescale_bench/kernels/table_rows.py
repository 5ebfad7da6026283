"""Kernels on table rows: gather, row optimizers, reads of fetched rows by tokens, deduplication,
collision masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from freescale.kernels.requests import reference as unique
from freescale.kernels.requests import triton as triton_unique
from freescale.kernels.row_updates import reference as row_updates
from freescale.kernels.row_updates import triton as triton_row_updates
from freescale.kernels.rows import reference as rows
from freescale.kernels.rows import triton as triton_rows
from freescale_bench.kernels.measure import Bench, Call

WIDTH = 128


def measure_rows(bench: Bench) -> dict[str, float]:
    count, used = bench.size["table"], bench.size["rows"]
    weight, first, second = (bench.draw(count, WIDTH).abs_() for _ in range(3))
    total = bench.draw(count).abs_()
    numbers = torch.randperm(count, device=bench.device)[:used]
    gradients = bench.draw(used, WIDTH)
    row = used * WIDTH * 4 / 1e9
    calls: dict[str, tuple[float, Callable[[Any], Any]]] = {
        "gather": (2 * row, lambda m: m.gather_rows(weight, numbers)),
        "sgd": (3 * row, lambda m: m.sgd(weight, numbers, gradients, lr=0.01)),
        "adagrad": (
            5 * row,
            lambda m: m.adagrad(weight, first, numbers, gradients, lr=0.01, eps=1e-8),
        ),
        "rowwise_adagrad": (
            3 * row,
            lambda m: m.rowwise_adagrad(weight, total, numbers, gradients, lr=0.01, eps=1e-8),
        ),
        "adam": (
            7 * row,
            lambda m: m.adam(
                weight,
                first,
                second,
                numbers,
                gradients,
                lr=1e-3,
                betas=(0.9, 0.999),
                eps=1e-8,
                step=9,
            ),
        ),
    }
    figures = {}
    for name, (size, call) in calls.items():
        modules = (triton_rows, rows) if name == "gather" else (triton_row_updates, row_updates)
        both = [lambda m=m, c=call: c(m) for m in modules]
        found = bench.measure(
            "rows", f"{name}, {used:,} of {count:,} x {WIDTH}", *both, gigabytes=size
        )
        figures[f"{name}, % of ceiling"] = found["ceiling_percent"]
    narrow = lambda: triton_rows.gather_rows(weight, numbers, torch.bfloat16)  # noqa: E731
    bench.measure(
        "rows", "gather to bf16", narrow, lambda: weight[numbers].bfloat16(), gigabytes=1.5 * row
    )
    wanted, part = (
        torch.randint(0, count, (used // 4,), device=bench.device),
        gradients[: used // 4],
    )
    duplicates = [lambda m=m: m.group_duplicates(wanted)(part) for m in (triton_rows, rows)]
    bench.measure("rows", f"sum of duplicates, {used // 4:,}", *duplicates, gigabytes=row / 2)
    _reads(bench, count, wanted)
    return figures


def _reads(bench: Bench, count: int, wanted: torch.Tensor) -> None:
    """Measures reads of fetched rows by a rank's tokens, with Zipf's law: some rows are read very
    often."""
    tokens = int(bench.lengths(bench.size["samples"]).sum())
    drawn = np.random.default_rng(0).zipf(1.2, tokens) % min(count, 10**9)
    keys = torch.from_numpy(drawn).to(bench.device)
    known, index = torch.unique(keys, return_inverse=True)
    fetched = bench.draw(len(known), WIDTH).requires_grad_()
    grad = bench.draw(tokens, WIDTH)
    size = (tokens + len(known)) * WIDTH * 4 / 1e9
    label = f"{tokens:,} tokens of {len(known):,} rows"
    both: list[Call] = [
        lambda: triton_rows.read_rows(fetched, index),
        lambda: F.embedding(index, fetched),
    ]
    bench.measure("rows", f"read, {label}", *both, gigabytes=size)
    outputs = [call() for call in both]
    back = [lambda o=o: torch.autograd.grad(o, fetched, grad, retain_graph=True) for o in outputs]
    bench.measure("rows", f"read backward, {label}", *back, gigabytes=size)
    edges = torch.arange(1, 65, device=bench.device) * (count // 64 + 1)
    plain = lambda: torch.unique(keys, return_inverse=True)  # noqa: E731
    bench.measure(
        "unique",
        f"deduplicate {tokens:,} keys",
        lambda: triton_unique.deduplicate(keys, edges),
        plain,
    )
    masks = [lambda m=m: m.collision_masks(wanted, known) for m in (triton_unique, unique)]
    bench.measure("unique", f"masks of {len(wanted):,} and {len(known):,} rows", *masks)
