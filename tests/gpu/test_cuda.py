"""What only a GPU can show: the same results as on the CPU, and a ledger that adds no
synchronization to the step.

Several ranks share one GPU through CUDA's MPS here (each says it is on a host of its own, which
NCCL wants); run by `tests/gpu/run.sh` on a machine with a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.gpu_training import CudaClicks
from helpers.toys import Clicks, clicks_batch, rank_slice

import freescale
from freescale.batch import SequenceBatch
from freescale.ledger.ledger import Ledger
from freescale.ledger.merge import merge_step
from freescale.models.heads import Retrieval
from freescale.models.hstu import HSTU
from freescale.transport.local import LocalTransport

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_batches_move_and_stay_the_same():
    batch = clicks_batch(9, 1)
    index = torch.tensor([3, 3, 0, 8])
    there = batch.to("cuda")
    expected, actual = batch.select(index), there.select(index.cuda())
    assert actual.device.type == "cuda"
    same(actual, expected)
    same(SequenceBatch.concat(there.split([2, 0, 7])), batch)


def same(actual, expected):
    for ours, theirs in zip(actual.tensors(), expected.tensors(), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def train(device, placement, optimizer, steps=4):
    torch.manual_seed(3)
    parallel = freescale.parallelize(
        CudaClicks(),
        Clicks.ids,
        optimizer,
        transport=LocalTransport(device),
        placement=placement,
        init_std=0.3,
        init="rows",
    )
    dense = torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2)
    pipeline = freescale.Pipeline(parallel, dense, clip=0.5, accumulate=2, precision="fp32")
    losses = [r.loss for r in pipeline.run([clicks_batch(13, seed) for seed in range(steps)])]
    ids, rows = parallel.tables.get_local_rows("item")
    return losses, rows[ids.argsort()].cpu()


@pytest.mark.parametrize("placement", ["sharded", "replicated"])
@pytest.mark.parametrize(
    "optimizer",
    [
        freescale.SGD(lr=0.1),
        freescale.Adagrad(lr=0.1),
        freescale.RowWiseAdagrad(lr=0.1),
        freescale.Adam(lr=0.1),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_training_equals_the_cpu(placement, optimizer):
    expected, actual = train("cpu", placement, optimizer), train("cuda", placement, optimizer)
    assert actual[0] == pytest.approx(expected[0], rel=1e-9)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-7, atol=1e-9)


def test_sums_of_duplicates_are_in_order():
    """Hundreds of contributions of very different size to a row: the bits of the CPU, every
    time."""
    from freescale.kernels.rows.reference import group_duplicates

    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 40, (8000,), generator=generator)
    gradients = torch.randn(8000, 64, generator=generator) * torch.logspace(-6, 6, 8000)[:, None]
    unique, expected = group_duplicates(rows)(gradients)
    for _ in range(5):
        found, sums = group_duplicates(rows.cuda())(gradients.cuda())
        assert torch.equal(found.cpu(), unique) and torch.equal(sums.cpu(), expected)


def retrieval_batch(seed):
    from freescale.batch import Jagged

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 60, (32,), generator=generator)
    tokens = int(lengths.sum())
    draw = lambda: Jagged(torch.randint(0, 500, (tokens,), generator=generator), lengths)  # noqa: E731
    return SequenceBatch(
        sequences={"history": draw(), "targets": draw(), "timestamps": draw()},
        dense={"negatives": torch.randint(0, 500, (32, 16), generator=generator)},
        weights={"next_item": lengths.float()},
        keys=torch.arange(32) * 7919 + seed,
    )


def hstu_losses(device, precision):
    torch.manual_seed(0)
    encoder = HSTU(
        width=64, layers=2, heads=2, max_length=64, dropout=0.2, position_bias=True, time_bias=True
    )
    model = Retrieval(encoder, num_items=500, table_device="meta")
    parallel = freescale.parallelize(
        model,
        model.features,
        freescale.Adam(lr=1e-2),
        transport=LocalTransport(device),
        init_std=0.125,
    )
    pipeline = freescale.Pipeline(
        parallel, torch.optim.AdamW(parallel.dense_parameters(), lr=1e-3), precision=precision
    )
    return [r.loss for r in pipeline.run([retrieval_batch(s) for s in range(6)])]


def test_hstu_in_all_precisions():
    """Dropout is keyed by the sample: the same masks on CPU and GPU. fp32 is float32 also where
    the process has TF32 on, and the default is bf16."""
    reference = hstu_losses("cpu", "fp32")
    plain = hstu_losses("cuda", "fp32")
    assert plain == pytest.approx(reference, rel=1e-4)
    rounded, half = hstu_losses("cuda", "tf32"), hstu_losses("cuda", "bf16")
    assert rounded == pytest.approx(reference, rel=5e-3) and rounded != plain
    assert half == pytest.approx(reference, rel=2e-2) and half == hstu_losses("cuda", "auto")
    torch.set_float32_matmul_precision("high")
    try:
        assert hstu_losses("cuda", "fp32") == plain
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_ledger_adds_no_synchronization():
    ledger = Ledger("cuda")
    x = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            ledger.begin_step(step)
            with ledger.span("forward"):
                for _ in range(20):
                    x = x @ x * 1e-3
            with ledger.begin_collective("rows", 1, 1, "nccl").wait():
                y = x + 1
            ledger.count("samples", y[:2].numel())
            ledger.end_step()
        ledger.drain()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    records = ledger.drain()
    for record in records:
        figures = merge_step([record])
        # 20 products of 4096^3 in fp32 take milliseconds on any GPU: the times are the device's,
        # not those of the launches.
        assert figures["spans_ms"]["forward"] > 1
        assert (
            figures["step_ms"]
            >= figures["spans_ms"]["forward"] + figures["exposed_ms"]["rows"] - 0.01
        )
    assert [r["step"] for r in records][-1] == 2


def test_command_line(tmp_path):
    from freescale.data.synthetic.generate import generate

    generate(
        tmp_path / "data.parquet",
        users=300,
        items=400,
        median=20,
        sigma=0.6,
        cap=60,
        global_batch=64,
        collision=None,
        seed=1,
    )
    arguments = [
        "train",
        "--data",
        tmp_path / "data.parquet",
        "--folder",
        tmp_path / "run",
        "--device",
        "cuda",
        "--steps",
        "8",
    ]
    command = [
        sys.executable,
        "-m",
        "freescale",
        *map(str, arguments),
        "--global-batch",
        "64",
        "--precision",
        "bf16",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert ledger["steps"] == 8 and ledger["peak_memory_bytes_per_rank"][0]["gpu"] > 0
    assert ledger["sparsity"] is not None
    resumed = [
        sys.executable,
        "-m",
        "freescale",
        "train",
        "--resume",
        "--folder",
        str(tmp_path / "run"),
        "--steps",
        "10",
    ]
    done = subprocess.run(resumed, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


SCRIPT = """
import json, os, sys, torch
sys.path[:0] = {path!r}
os.environ["NCCL_HOSTID"] = "host" + os.environ["RANK"]
os.environ["NCCL_SOCKET_IFNAME"] = "lo"
import freescale
from helpers.gpu_training import CudaClicks
from helpers.toys import Clicks, clicks_batch, rank_slice
transport = freescale.connect(torch.device("cuda:0"))
torch.manual_seed(3)
rows = freescale.Adagrad(lr=0.1)
parallel = freescale.parallelize(
    CudaClicks(), Clicks.ids, rows, transport=transport, placement="sharded", init_std=0.3
)
from freescale.balance.partitioners.lookup import find_partitioner
balancer = None
if sys.argv[2] != "none":
    partitioner = find_partitioner(sys.argv[2], "cuda")
    balancer = freescale.Balancer(partitioner, freescale.CostModel.balanced_at(5), adapt=True)
optimizer = torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2)
pipeline = freescale.Pipeline(parallel, optimizer, clip=0.5, balance=balancer, precision="fp32")
batches = [rank_slice(clicks_batch(13, seed), transport.rank, transport.world) for seed in range(4)]
losses = [r.loss for r in pipeline.run(batches)]
from freescale.train.state.checkpoints import Checkpoints
from pathlib import Path
folder = Path(sys.argv[1])
Checkpoints(folder / "checkpoints", transport).save(parallel, pipeline.optimizer, {{"step": 4}})
from freescale.ledger.collector import Collector
torch.cuda.synchronize()
gather, offsets = transport.gather_bytes, transport.clock_offsets
rank, world = transport.rank, transport.world
collector = Collector(transport.ledger, rank, world, gather, None, offsets=offsets)
result = collector.close(transport.device)
if transport.rank == 0:
    (folder / "result.json").write_text(json.dumps({{"losses": losses, "ledger": result}}))
transport.close()
"""


@pytest.mark.parametrize("partitioner", ["none", "greedy", "fixed"])
def test_ranks_over_nccl_on_one_gpu(tmp_path, partitioner):
    """Two ranks, one GPU: losses as on the CPU wherever samples are computed, and the ledger has
    the arrivals of both."""
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT.format(path=[str(Path(__file__).parents[1])]))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path),
        partitioner,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    torch.manual_seed(3)
    parallel = freescale.parallelize(
        CudaClicks(), Clicks.ids, freescale.Adagrad(lr=0.1), placement="sharded", init_std=0.3
    )
    pipeline = freescale.Pipeline(
        parallel,
        torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2),
        clip=0.5,
        precision="fp32",
    )
    expected = [
        r.loss
        for r in pipeline.run([rank_slice(clicks_batch(13, seed), 0, 1) for seed in range(4)])
    ]
    assert result["losses"] == pytest.approx(expected, rel=1e-9)
    ledger = result["ledger"]
    assert (
        ledger["ranks"] == 2
        and ledger["measured_steps"] == 2
        and ledger["bytes_per_step"]["rows"] > 0
    )
    assert (ledger["moved_tokens_percent"] or 0) > 0 or partitioner == "none"
    assert (tmp_path / "checkpoints" / "step-00000004" / "state.json").exists()
