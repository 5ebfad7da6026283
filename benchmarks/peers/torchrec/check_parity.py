"""Shows that TorchRec's arms compute what the workload defines: 2 ranks against plain torch in one
process.

    .venv-peer/bin/python benchmarks/peers/torchrec/check_parity.py [PIPELINE ...]

Prints the largest differences of loss, table and dense weights after a few steps for each pipeline,
row optimizer and id distribution, and fails if one is above the tolerance.
"""

from __future__ import annotations

import dataclasses
import itertools
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from freescale_bench.common.workload import (
    ROW_OPTIMIZERS,
    Dense,
    Workload,
    fill_table,
    make_batches,
    make_dense_optimizer,
)
from torch import Tensor
from torchrec_arms import build

WORLD = 2
TOLERANCE = 1e-5
# Adagrad divides a gradient near zero by about epsilon, its rounding error with it: 1e-8 would show
# that alone.
BASE = Workload(
    rows=3001,
    width=32,
    samples=8,
    median_length=20,
    maximum_length=100,
    hidden=(48,),
    steps=6,
    row_epsilon=1e-5,
)
# so that each moves its rows visibly
ROW_LEARNING_RATES = {"sgd": 5.0, "adagrad": 0.05, "rowwise_adagrad": 0.05}
POPULARITIES: tuple[Any, ...] = (1.1, "unique")


def oracle(workload: Workload, world: int) -> tuple[list[float], Tensor, Dense]:
    """The workload's update in one process, on the batches of all ranks: losses, table, dense
    layers."""
    table = torch.empty(workload.rows, workload.width)
    fill_table(workload, table, 0)
    accumulator = torch.zeros(workload.rows, workload.width)
    dense = Dense(workload)
    optimizer = make_dense_optimizer(workload, dense.parameters())
    losses = []
    for parts in zip(*(make_batches(workload, rank, world) for rank in range(world)), strict=True):
        ids, lengths, labels = (torch.cat(columns) for columns in zip(*parts, strict=True))
        rows = table[ids].requires_grad_()
        optimizer.zero_grad()
        loss = dense(rows, lengths, labels, lengths) / (workload.samples * world)
        loss.backward()
        optimizer.step()
        assert rows.grad is not None
        gradient = torch.zeros_like(table).index_add_(0, ids, rows.grad)
        if workload.row_optimizer == "adagrad":
            accumulator += gradient**2
        elif workload.row_optimizer == "rowwise_adagrad":
            accumulator += (gradient**2).mean(1, keepdim=True)
        if workload.row_optimizer != "sgd":
            gradient = gradient / (accumulator.sqrt() + workload.row_epsilon)
        table -= workload.row_learning_rate * gradient
        losses.append(float(loss.detach()))
    return losses, table, dense


def compare(workload: Workload, rank: int, pipeline: Any, deduplicate: bool) -> dict[str, float]:
    """Largest difference of any rank from the oracle, by what differs; `moved` is how far training
    took the table."""
    arm = build(workload, rank, WORLD, pipeline, deduplicate)
    losses = [arm.step() for _ in range(workload.steps)]
    arm.finish()
    expected_losses, table, dense = oracle(workload, WORLD)
    mine = table[arm.first_row : arm.first_row + arm.shard.shape[0]]
    before = torch.empty_like(mine)
    fill_table(workload, before, arm.first_row)
    pairs = list(zip(arm.dense.state_dict().values(), dense.state_dict().values(), strict=True))
    found = torch.tensor(
        [
            max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)),
            float((arm.shard - mine).abs().max()),
            max(float((a - b).abs().max()) for a, b in pairs),
            float((mine - before).abs().max()),
        ]
    )
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    arm.close()
    return dict(zip(("loss", "table", "dense", "moved"), found.tolist(), strict=True))


def run(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    failed = []
    # semi_sync and prefetch_sparse_dist need CUDA; pec needs TorchRec 1.9
    pipelines = sys.argv[1:] or ["base", "sparse_dist", "sparse_dist_late"]
    arms = itertools.product(pipelines, ROW_OPTIMIZERS, POPULARITIES, (False, True))
    for pipeline, optimizer, popularity, deduplicate in arms:
        workload = dataclasses.replace(
            BASE,
            row_optimizer=optimizer,
            row_learning_rate=ROW_LEARNING_RATES[optimizer],
            popularity=popularity,
        )
        found = compare(workload, rank, pipeline, deduplicate)
        name = f"{pipeline:12} {optimizer:16} {popularity!s:7} deduplicate={deduplicate!s:6}"
        figures = "  ".join(f"{key} {value:.1e}" for key, value in found.items())
        # A table that did not move would agree with anything.
        good = (
            max(found["loss"], found["table"], found["dense"]) <= TOLERANCE
            and found["moved"] > 100 * TOLERANCE
        )
        failed += [] if good else [name]
        if rank == 0:
            print(f"{name} {figures}  {'agrees' if good else 'DIFFERS'}", flush=True)
    dist.destroy_process_group()
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen = free.getsockname()[1]
    multiprocessing.spawn(run, (chosen,), nprocs=WORLD)
