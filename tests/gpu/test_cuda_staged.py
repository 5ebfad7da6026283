"""The staged schedule on a GPU: lanes on streams of their own, through pinned memory, the same bits
as the serial schedule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.gpu_training import differences

from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.pipeline.staged import Staged
from freescale.transport.local import LocalTransport

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # Triton's kernels, plain torch's
@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_bit_equal_to_serial(optimizer, dtype):
    """By its lanes, although there is one rank only."""
    assert differences(LocalTransport("cuda"), Staged, optimizer=optimizer, dtype=dtype) == []


def test_the_stale_control_is_seen():
    assert {"item/rows", "losses"} <= set(differences(LocalTransport("cuda"), "stale"))


SCRIPT = """
import json, os, sys, torch
sys.path[:0] = {path!r}
os.environ["NCCL_HOSTID"] = "host" + os.environ["RANK"]
os.environ["NCCL_SOCKET_IFNAME"] = "lo"
import freescale
from helpers.gpu_training import differences
transport = freescale.connect(torch.device("cuda:0"))
arms = (
    {{}},
    {{"optimizer": "adam", "dtype": torch.float32}},
    {{"balanced": True}},
    {{"dense_sums": "partitioned"}},
    {{"dense_sums": "auto"}},
)
found = {{str(options): differences(transport, **options) for options in arms}}
found["stale"] = differences(transport, "stale")
everyone = [json.loads(part) for part in transport.gather_bytes(json.dumps(found).encode())]
if transport.rank == 0:
    open(sys.argv[1], "w").write(json.dumps(everyone))
transport.close()
"""


def test_bit_equal_on_ranks_over_nccl(tmp_path):
    script, result = tmp_path / "ranks.py", tmp_path / "result.json"
    script.write_text(SCRIPT.format(path=[str(Path(__file__).parents[1])]))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(result),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for found in json.loads(result.read_text()):
        assert "losses" in found.pop("stale")
        assert found == dict.fromkeys(found, [])
