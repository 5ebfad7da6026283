"""Times the compute of a step for calibrate.py: an HSTU stack, row kernels, dense optimizer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from freescale.batch import Jagged, SequenceBatch
from freescale.kernels.dispatch.requests import collision_masks, deduplicate
from freescale.kernels.dispatch.rows import (
    choose_optimizers,
    gather_rows,
    group_duplicates,
    read_rows,
)
from freescale.models.heads import Retrieval
from freescale.models.hstu import HSTU

ITEMS, NEGATIVES = 1000, 64  # of the head that is timed: sampled softmax


def time_model(
    device: str, width: int, heads: int, layers: int, lengths: NDArray[Any], repetitions: int
) -> dict[str, Any]:
    """Times the encoder alone, then a whole retrieval model; the difference is the head's."""
    torch.manual_seed(0)
    tokens, longest = int(lengths.sum()), int(lengths.max())
    plain: dict[str, Any] = {"dropout": 0.0, "position_bias": False, "time_bias": False}
    encoder = HSTU(width=width, layers=layers, heads=heads, max_length=max(longest, 2), **plain).to(
        device
    )
    there = torch.from_numpy(lengths)
    on_device = there.to(device)
    x = torch.randn(tokens, width, device=device).requires_grad_()
    alone = _time_both_ways(
        device, encoder, lambda: encoder(x, on_device).float().square().sum(), repetitions
    )
    ids = [Jagged(torch.randint(ITEMS, (tokens,)), there) for _ in range(2)]
    batch = SequenceBatch(
        sequences={"history": ids[0], "targets": ids[1]},
        dense={"negatives": torch.randint(ITEMS, (len(lengths), NEGATIVES))},
        weights={"next_item": there.float()},
        keys=torch.arange(len(lengths)),
    ).to(torch.device(device))
    whole = Retrieval(encoder, num_items=ITEMS).to(device)
    total = _time_both_ways(device, whole, lambda: whole(batch)["next_item"], repetitions)
    found = dict(zip(("forward_ms", "backward_ms"), alone, strict=True))
    found |= {
        f"head_{way}_ms": max(0.0, b - a)
        for way, a, b in zip(("forward", "backward"), alone, total, strict=True)
    }
    squares = float((lengths.astype(np.float64) ** 2).sum())
    sizes = {"samples": len(lengths), "tokens": tokens, "squares": squares, "longest": longest}
    return {"width": width, "heads": heads, **sizes, "layers": layers, **found}


def _time_both_ways(
    device: str, model: nn.Module, call: Callable[[], Tensor], repetitions: int
) -> tuple[float, float]:
    """Milliseconds of forward and of backward."""
    forward, backward = [], []
    for repetition in range(repetitions + 2):  # the first two warm up
        model.zero_grad()
        begin = _read_clock(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = call()
        middle = _read_clock(device)
        loss.backward()  # type: ignore[no-untyped-call]
        end = _read_clock(device)
        if repetition >= 2:
            forward.append(1e3 * (middle - begin))
            backward.append(1e3 * (end - middle))
    return _choose_usual(device, forward), _choose_usual(device, backward)


def _choose_usual(device: str, times: list[float]) -> float:
    """The median; on a CPU the shortest, since other processes only add time."""
    return statistics.median(times) if device == "cuda" else min(times)


def _read_clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _time_call(device: str, call: Callable[[], Any], repetitions: int) -> float:
    times = []
    for _ in range(repetitions + 2):
        begin = _read_clock(device)
        call()
        times.append(_read_clock(device) - begin)
    return _choose_usual(device, times[2:])  # the first two warm up


def time_row_work(
    device: str, width: int, keys: int, table: int, repetitions: int
) -> dict[str, float]:
    """Seconds per key or per byte of row, and the constant of a call, measured with ten rows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(table, width, device=device)
    numbers = torch.randint(table, (keys,), generator=generator).to(device)
    unique, edges = torch.unique(numbers), torch.tensor([table], device=device)
    gradients = torch.randn(unique.numel(), width, device=device)
    state = torch.zeros(table, device=device)
    module = choose_optimizers(weight)
    read = torch.randn(unique.numel(), width, device=device).requires_grad_()
    index = torch.randint(unique.numel(), (keys,), generator=generator).to(device)
    few, few_gradients = unique[:10], gradients[:10]

    def update(rows: torch.Tensor, grads: torch.Tensor) -> None:
        module.rowwise_adagrad(
            weight, state, *group_duplicates(rows, grads)(grads), lr=0.01, eps=1e-8
        )

    def backward() -> None:
        ones = torch.ones(keys, width, device=device)
        read_rows(read, index).backward(ones)  # type: ignore[no-untyped-call]
        read.grad = None

    def measure(call: Callable[[], Any]) -> float:
        return _time_call(device, call, repetitions)

    with torch.no_grad():
        constant = measure(lambda: update(few, few_gradients))
        looked = measure(lambda: gather_rows(weight, unique))
        updated = measure(lambda: update(unique, gradients))
        found = measure(lambda: deduplicate(numbers, edges))
        compared = measure(lambda: collision_masks(unique, unique.flip(0)))
        forward = measure(lambda: read_rows(read, index))
    both = measure(backward)
    size, row = 4.0 * width, unique.numel()
    return {
        "deduplicate_per_key": found / keys,
        "compare_per_key": compared / (2 * row),
        "lookup_per_byte": looked / (row * size),
        "update_per_byte": max(0.0, updated - constant) / (row * size),
        "read_per_byte": forward / (keys * size),
        "read_backward_per_byte": max(0.0, both - forward) / (keys * size),
        "constant": constant,
    }


def time_optimizer(device: str, many: int, repetitions: int) -> dict[str, float]:
    """Times AdamW on one large and one small parameter."""

    def time_step(count: int) -> float:
        parameter = torch.zeros(count, device=device, requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW([parameter], lr=1e-3)
        return _time_call(device, optimizer.step, repetitions)

    small = time_step(16)
    return {"per_parameter": max(0.0, time_step(many) - small) / many, "constant": small}
