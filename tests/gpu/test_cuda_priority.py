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
from helpers.toys import Clicks, clicks_batch, rank_slice
from test_cuda import CudaClicks

import freescale
from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import PARTITIONERS
from freescale.embedding import collision
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.transport.local import LocalTransport

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = 30


def no_collisions(current, coming):
    return torch.zeros_like(current, dtype=torch.bool), torch.zeros_like(coming, dtype=torch.bool)


def train(transport, schedule, optimizer="adagrad", balanced=False, dtype=torch.float64, **options):
    """Losses and the bits of this rank's tables and of the dense weights. About a third of the rows
    collide."""
    collision._LEAST_BYTES["cuda"], collision._LEAST_MESSAGE = 256, 1  # several pieces
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True)
    rows = ROW_OPTIMIZERS[optimizer](lr=0.3)
    parallel = freescale.parallelize(
        CudaClicks(dtype=dtype),
        Clicks.ids,
        rows,
        transport=transport,
        placement="sharded",
        init_std=0.3,
    )
    if balanced:
        options["balancer"] = Balancer(PARTITIONERS["greedy"], CostModel.balanced_at(5))
    if schedule == "stale":
        schedule, options["masks"] = "staged", no_collisions
    pipeline = freescale.Pipeline(
        parallel,
        torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2),
        schedule=schedule,
        **options,
    )
    batches = [
        rank_slice(clicks_batch(40, seed), transport.rank, transport.world) for seed in range(STEPS)
    ]
    losses = [result.loss for result in pipeline.run(batches)]
    state = {
        f"{name}/{part}": value
        for name in parallel.tables.specs
        for part, value in parallel.tables.local(name).items()
    }
    state |= dict(parallel.module.named_parameters())
    torch.use_deterministic_algorithms(False)
    return losses, {
        name: value.detach().clone().view(torch.uint8).cpu() for name, value in state.items()
    }


def differences(transport, schedule="staged", **options):
    losses, expected = train(transport, "serial", **options)
    actual_losses, actual = train(transport, schedule, **options)
    different = [name for name, value in expected.items() if not torch.equal(actual[name], value)]
    return different + ["losses"] * (losses != actual_losses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # Triton's kernels, plain torch's
@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_bit_equal_to_serial(optimizer, dtype):
    assert differences(LocalTransport("cuda"), optimizer=optimizer, dtype=dtype) == []


def test_the_stale_control_is_seen():
    assert {"item/rows", "losses"} <= set(differences(LocalTransport("cuda"), "stale"))


SCRIPT = """
import json, os, sys, torch
sys.path[:0] = {path!r}
os.environ["NCCL_HOSTID"] = "host" + os.environ["RANK"]
os.environ["NCCL_SOCKET_IFNAME"] = "lo"
import freescale
from test_cuda_priority import differences
transport = freescale.connect(torch.device("cuda:0"))
arms = ({{}}, {{"optimizer": "adam", "dtype": torch.float32}}, {{"balanced": True}}, {{"dense_sums": "partitioned"}})
found = {{str(options): differences(transport, **options) for options in arms}}
found["stale"] = differences(transport, "stale")
everyone = [json.loads(part) for part in transport.gather_bytes(json.dumps(found).encode())]
if transport.rank == 0:
    open(sys.argv[1], "w").write(json.dumps(everyone))
transport.close()
"""


def test_bit_equal_on_ranks_over_nccl(tmp_path):
    here = str(Path(__file__).parent)
    script, result = tmp_path / "ranks.py", tmp_path / "result.json"
    script.write_text(SCRIPT.format(path=[here, str(Path(here).parent)]))
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
