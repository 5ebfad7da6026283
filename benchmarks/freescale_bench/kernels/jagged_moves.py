"""Jagged moves on a device: dispatch and combine for an AllToAll over W ranks, permutation of
samples, transpose of features.

The paper packs so; our training does it on the host (`freescale.batch_codec`).
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch

from freescale_bench.kernels import jagged, triton_jagged
from freescale_bench.kernels.measure import Bench, rotate

WIDTH = 128


def measure_moves(bench: Bench) -> dict[str, float]:
    return _measure_ids(bench) | _measure_payloads(bench)


def _measure_ids(bench: Bench) -> dict[str, float]:
    lengths = bench.lengths(bench.size["samples"])[None]
    tokens, samples = int(lengths.sum()), lengths.shape[1]
    generator = np.random.default_rng(1)
    order = generator.permutation(samples)
    # small inputs rotate, so that the cache does not hold them
    sets = 16 if bench.device.type == "cuda" else 1
    slowest = {"dispatch": 0.0, "combine": 0.0}
    ids = [torch.randint(0, 1 << 40, (tokens,), device=bench.device) for _ in range(sets)]
    for world in bench.size["worlds"]:
        counts = np.bincount(generator.integers(0, world, samples), minlength=world)
        plans = {
            "dispatch": jagged.plan_dispatch(lengths, order, counts),
            "combine": jagged.plan_combine(lengths[:, order], counts),
        }
        for kind, plan in plans.items():
            ours = rotate([partial(triton_jagged.move, [x], plan) for x in ids])
            plain = rotate([partial(jagged.move, [x], plan) for x in ids])
            row = bench.measure(
                "moves",
                f"{kind} of ids, W = {world}",
                ours,
                plain,
                gigabytes=2 * ids[0].nbytes / 1e9,
            )
            slowest[kind] = max(slowest[kind], row["ms"]["median"])
    started = time.perf_counter()
    jagged.plan_dispatch(lengths, order, counts)
    planned = {"median": 1e3 * (time.perf_counter() - started)}
    bench.add({"group": "moves", "case": "plan of a dispatch, host", "ms": planned})
    two = np.stack([lengths[0], bench.lengths(samples, 2)])
    plan = jagged.plan_transpose(two)
    values = [torch.randint(0, 1 << 40, (n,), device=bench.device) for n in plan.source.rows]
    size = 2 * sum(value.nbytes for value in values) / 1e9
    both = [lambda m=m: m.move(values, plan) for m in (triton_jagged, jagged)]
    bench.measure("moves", "transpose of two features of ids", *both, gigabytes=size)
    return {f"{kind} of ids, slowest W, ms": slow for kind, slow in slowest.items()}


def _measure_payloads(bench: Bench) -> dict[str, float]:
    lengths = bench.lengths(bench.size["samples"])[None]
    samples, world = lengths.shape[1], bench.size["worlds"][-1]
    generator = np.random.default_rng(1)
    order = generator.permutation(samples)
    counts = np.bincount(generator.integers(0, world, samples), minlength=world)
    worst = 100.0
    for share in (1.0, 0.45):  # about 150 and 65 MB of payload on a GPU
        some = np.maximum(1, (lengths * share).astype(np.int64))
        plans = {
            "dispatch": jagged.plan_dispatch(some, order, counts, [(WIDTH,)]),
            "combine": jagged.plan_combine(some[:, order], counts, [(WIDTH,)]),
            "permute": jagged.plan_permute(some, order, [(WIDTH,)]),
        }
        for kind, plan in plans.items():
            value = bench.draw(plan.source.rows[0], *plan.source.shapes[0], dtype=torch.bfloat16)
            size = value.nbytes / 1e9
            for name, way in (("", plan), (" backward", plan.inverse)):
                given = value if not name else triton_jagged.move([value], plan)[0]
                both = [lambda m=m, g=given, w=way: m.move([g], w) for m in (triton_jagged, jagged)]
                label = f"{kind}{name} of {1e3 * size:.0f} MB of bf16 rows"
                row = bench.measure("moves", label, *both, gigabytes=2 * size)
                worst = min(worst, row["ceiling_percent"])
    return {"moves of payloads, worst % of ceiling": worst}
