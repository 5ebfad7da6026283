"""Divided histories on a GPU: in one process against the whole ones, and on ranks that share it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import divided_program
from helpers.divided_cases import build_model, differentiate, divide_here, make_batch

from freescale.transport.shared_gpu import PART

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LENGTHS = [3000, 120, 700, 33, 5]


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
@pytest.mark.parametrize(("low", "recompute"), [(False, False), (True, False), (True, True)])
def test_parts_compute_what_the_whole_does(task, low, recompute):
    """Losses and gradients; those of the whole run fused. In bf16 both are about as far from
    float32."""
    options = {"width": 64, "max_length": 3000, "recompute": recompute, "table_device": "cuda"}
    module = build_model(task, features=True, **options).float().cuda()
    batch = make_batch(LENGTHS, task, 2, features=True)
    exact = differentiate(module, batch.to("cuda"))
    with torch.autocast("cuda", torch.bfloat16, enabled=low):
        whole = differentiate(module, batch.to("cuda"))
        found = differentiate(module, divide_here(batch, 4).to("cuda"))
    for name, value in exact.items():
        errors = [
            float((other[name] - value).norm() / value.norm().clamp(min=1e-6))
            for other in (found, whole)
        ]
        assert errors[0] < 1e-4 + 2 * errors[1], (name, errors)


def test_ranks_with_parts_over_nccl_and_hostwire(tmp_path):
    ranks, result = 3, tmp_path / "found.json"
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "2",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        PART: str(100 // ranks),
    }
    command = [sys.executable, *start, divided_program.__file__, "cuda", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    everyone = json.loads(result.read_text())
    for task in everyone[0]:
        assert sum(rank[task]["parts"] for rank in everyone) >= 8
        for rank in everyone:
            assert rank[task]["loss"] < 1e-4 and rank[task]["state"] < 1e-3, rank
            assert rank[task]["different"] == [], "staged differs from serial"
