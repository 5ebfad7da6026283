"""Measures the compute curve of this machine: an HSTU stack's forward and backward over lengths,
batches and widths, the row kernels and the dense optimizer; fits it and keeps it as a file
(compute.py reads it).

    freescale simulate calibrate --device cuda --out h200.json

What compute loses while a transport communicates beside it cannot be measured by one process: the
factors are those of the overlap benchmark (benchmarks/results, DESIGN section 4), named in the
file.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from freescale.batch import Jagged, SequenceBatch
from freescale.kernels.dispatch import (
    choose_optimizers,
    collision_masks,
    deduplicate,
    gather_rows,
    read_rows,
    sum_duplicates,
)
from freescale.models.heads import Retrieval
from freescale.models.hstu import HSTU

ITEMS, NEGATIVES = 1000, 64  # of the head that is measured: sampled softmax

# Histories of equal length (length, samples), and one jagged batch (median, cap, samples).
CASES: dict[str, dict[str, Any]] = {
    "cuda": {
        "equal": [
            (256, 128),
            (1024, 64),
            (1024, 256),
            (4096, 16),
            (4096, 64),
            (10_500, 8),
            (21_000, 2),
            (21_000, 8),
        ],
        "jagged": [(1000, 21_000, 128), (3000, 21_000, 32), (3000, 21_000, 128)],
        "keys": 500_000,
        "table": 4_000_000,
        "parameters": 16_000_000,
        "shapes": [(512, 4), (256, 4), (128, 2)],
    },
    "cpu": {
        "equal": [(32, 8), (128, 4), (128, 16), (512, 2), (512, 6), (1500, 1), (1500, 2)],
        "jagged": [(150, 1500, 12), (150, 1500, 24)],
        "keys": 20_000,
        "table": 100_000,
        "parameters": 1_000_000,
        "shapes": [(64, 2)],
    },
}
SLOWDOWN = {
    "cuda": ({"collective": 1.159, "hostwire": 1.008}, "overlap-4ranks-h200.json as of commit "
                                                       "5f196b9: HSTU layers beside NCCL as "
             "it is and beside hostwire with the same traffic, medians of nine"),
    "cpu": ({"collective": 1.71, "hostwire": 1.71}, ("one core for compute and gloo: "
                                                    "priority-hosts.json, serial and stale")),
}  # fmt: skip


def calibrate(
    device: str,
    name: str,
    *,
    shapes: Sequence[tuple[int, int]] = (),
    layers: int = 2,
    repetitions: int = 5,
    seen: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The calibration as plain data. `shapes`: (width, heads)."""
    if device not in CASES:
        raise ValueError(f"device {device!r} is not one of {', '.join(CASES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no GPU on this machine")
    cases = CASES[device]
    # a process that is pinned to a core has one thread
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    measured, fitted = [], []
    for width, heads in shapes or cases["shapes"]:
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads")
        rows = [
            _stack(device, width, heads, layers, lengths, repetitions)
            for lengths in _batches(cases)
        ]
        for row in rows:
            took = f"{row['forward_ms']:.2f} + {row['backward_ms']:.2f} ms"
            seen(f"width {width}: {row['samples']} samples, {row['tokens']:,} tokens: {took}")
        measured += rows
        fitted.append(fit(rows, width, heads, "bf16" if device == "cuda" else "fp32"))
    width = (shapes or cases["shapes"])[0][0]
    slowdown, source = SLOWDOWN[device]
    return {
        "name": name,
        "source": f"measured by `freescale simulate calibrate --device {device}`",
        "device": device,
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "shapes": fitted,
        "rows": _row_work(device, width, cases["keys"], cases["table"], repetitions),
        "optimizer": _optimizer(device, cases["parameters"], repetitions),
        "slowdown": slowdown,
        "slowdown_source": source,
        "measured": measured,
    }


def fit(rows: Sequence[dict[str, Any]], width: int, heads: int, precision: str) -> dict[str, Any]:
    """Coefficients of one layer, none negative, that are closest to the measured times in relative
    terms; and how close."""
    features = np.array([[row["squares"], row["tokens"], row["samples"], 1.0] for row in rows])
    shape: dict[str, Any] = {
        "width": width,
        "heads": heads,
        "precision": precision,
        "longest": max(r["longest"] for r in rows),
    }
    for way in ("forward", "backward"):
        seconds = np.array([row[f"{way}_ms"] / 1e3 / row["layers"] for row in rows])
        coefficients = _not_negative(features / seconds[:, None], np.ones(len(rows)))
        error = np.abs(features @ coefficients / seconds - 1)
        shape[way] = dict(
            zip(("quadratic", "linear", "sample", "constant"), coefficients.tolist(), strict=True)
        )
        shape[f"{way}_error_percent"] = {
            "median": float(100 * np.median(error)),
            "largest": float(100 * error.max()),
        }
        head = np.array([row[f"head_{way}_ms"] for row in rows]).sum() / 1e3 / features[:, 1].sum()
        shape[f"head_{way}"] = {
            "quadratic": 0.0,
            "linear": float(head),
            "sample": 0.0,
            "constant": 0.0,
        }
    return shape


def _not_negative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares without negative coefficients: the most negative one is left out until there is
    none."""
    scale = np.abs(rows).max(axis=0)
    kept = list(range(rows.shape[1]))
    while kept:
        solution = np.linalg.lstsq((rows / scale)[:, kept], wanted, rcond=None)[0]
        if solution.min() >= 0:
            result = np.zeros(rows.shape[1])
            result[kept] = solution
            return result / scale
        del kept[int(solution.argmin())]
    raise ValueError(
        "the measured times grow with nothing that was varied: measure again on a quiet machine"
    )


def _batches(cases: dict[str, Any]) -> list[np.ndarray]:
    equal = [np.full(samples, length) for length, samples in cases["equal"]]
    random = np.random.default_rng(0)
    jagged = [
        np.clip(random.lognormal(np.log(median), 1.0, samples).astype(np.int64), 1, cap)
        for median, cap, samples in cases["jagged"]
    ]
    return equal + jagged


def _stack(
    device: str, width: int, heads: int, layers: int, lengths: np.ndarray, repetitions: int
) -> dict[str, Any]:
    """The encoder alone, then a whole retrieval model: what is more of it is the head's."""
    torch.manual_seed(0)
    tokens, longest = int(lengths.sum()), int(lengths.max())
    plain: dict[str, Any] = {"dropout": 0.0, "position_bias": False, "time_bias": False}
    encoder = HSTU(width=width, layers=layers, heads=heads, max_length=max(longest, 2), **plain).to(
        device
    )
    there = torch.from_numpy(lengths)
    on_device = there.to(device)
    x = torch.randn(tokens, width, device=device).requires_grad_()
    alone = _both_ways(
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
    total = _both_ways(device, whole, lambda: whole(batch)["next_item"], repetitions)
    found = dict(zip(("forward_ms", "backward_ms"), alone, strict=True))
    found |= {
        f"head_{way}_ms": max(0.0, b - a)
        for way, a, b in zip(("forward", "backward"), alone, total, strict=True)
    }
    squares = float((lengths.astype(np.float64) ** 2).sum())
    sizes = {
        "samples": len(lengths),
        "tokens": tokens,
        "squares": squares,
        "longest": longest,
        "layers": layers,
    }
    return {"width": width, "heads": heads, **sizes, **found}


def _both_ways(
    device: str, model: nn.Module, call: Callable[[], Tensor], repetitions: int
) -> tuple[float, float]:
    """Milliseconds of forward and of backward."""
    forward, backward = [], []
    for repetition in range(repetitions + 2):  # the first two warm up
        model.zero_grad()
        begin = _now(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = call()
        middle = _now(device)
        loss.backward()
        end = _now(device)
        if repetition >= 2:
            forward.append(1e3 * (middle - begin))
            backward.append(1e3 * (end - middle))
    return _usual(device, forward), _usual(device, backward)


def _usual(device: str, times: list[float]) -> float:
    """The median. On a CPU the shortest: whatever else runs there only adds."""
    return statistics.median(times) if device == "cuda" else min(times)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _seconds(device: str, call: Callable[[], Any], repetitions: int) -> float:
    times = []
    for repetition in range(repetitions + 2):
        begin = _now(device)
        call()
        if repetition >= 2:
            times.append(_now(device) - begin)
        else:
            _now(device)
    return _usual(device, times)


def _row_work(device: str, width: int, keys: int, table: int, repetitions: int) -> dict[str, float]:
    """Seconds per key or per byte of row, and the constant of a call: that of ten rows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(table, width, device=device)
    numbers = torch.randint(table, (keys,), generator=generator).to(device)
    unique, edges = numbers.unique(), torch.tensor([table], device=device)
    gradients = torch.randn(unique.numel(), width, device=device)
    state = torch.zeros(table, device=device)
    module = choose_optimizers(weight)
    read = torch.randn(unique.numel(), width, device=device).requires_grad_()
    index = torch.randint(unique.numel(), (keys,), generator=generator).to(device)
    few, few_gradients = unique[:10], gradients[:10]

    def update(rows: torch.Tensor, grads: torch.Tensor) -> None:
        module.rowwise_adagrad(weight, state, *sum_duplicates(rows, grads), lr=0.01, eps=1e-8)

    def backward() -> None:
        read_rows(read, index).backward(torch.ones(keys, width, device=device))
        read.grad = None

    with torch.no_grad():
        constant = _seconds(device, lambda: update(few, few_gradients), repetitions)
        looked = _seconds(device, lambda: gather_rows(weight, unique), repetitions)
        updated = _seconds(device, lambda: update(unique, gradients), repetitions)
        found = _seconds(device, lambda: deduplicate(numbers, edges), repetitions)
        compared = _seconds(device, lambda: collision_masks(unique, unique.flip(0)), repetitions)
        forward = _seconds(device, lambda: read_rows(read, index), repetitions)
    both = _seconds(device, backward, repetitions)
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


def _optimizer(device: str, many: int, repetitions: int) -> dict[str, float]:
    """AdamW on one large parameter, and on one small."""

    def of(count: int) -> float:
        parameter = torch.zeros(count, device=device, requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW([parameter], lr=1e-3)
        return _seconds(device, optimizer.step, repetitions)

    small = of(16)
    return {"per_parameter": max(0.0, of(many) - small) / many, "constant": small}
