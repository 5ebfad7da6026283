"""Ranks that train whole and divided histories: `python -m torch.distributed.run ...
divided_program.py DEVICE RESULT`. Rank 0 writes the largest differences of all ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from freescale_bench.common.ranks import gather_json, join

from helpers.divided_cases import make_batch, train_divided

LENGTHS = ([900, 30, 70, 20, 110, 5, 400, 60], [3, 900, 5, 8])
OPTIONS = {
    "width": 64, "max_length": 1000, "dtype": torch.float32, "precision": "fp32",
    "dense_sums": "collective", "gathers": False,
}  # fmt: skip


def run(device: str, result: Path) -> None:
    transport, found = join(device, 120.0, "auto"), {}
    for task, recompute in (("retrieval", False), ("ranking", True)):
        batches = [make_batch(lengths, task, seed) for seed, lengths in enumerate(LENGTHS)]
        options = {"task": task, "recompute": recompute, **OPTIONS}
        whole = train_divided(transport, batches, **options)
        serial, staged = (
            train_divided(transport, batches, split=4, schedule=schedule, **options)
            for schedule in ("serial", "staged")
        )
        found[task] = {
            "parts": sum(serial[2]),
            "loss": max(abs(a / b - 1) for a, b in zip(serial[0], whole[0], strict=True)),
            "state": max(_relate(serial[1][name], value) for name, value in whole[1].items()),
            "different": [n for n, x in serial[1].items() if not torch.equal(x, staged[1][n])],
        }
    everyone = gather_json(transport, found)
    if transport.rank == 0:
        result.write_text(json.dumps(everyone))
    transport.gather_bytes(b"")
    os._exit(0)  # several NCCL groups on one GPU would wait for each other


def _relate(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-9))


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
