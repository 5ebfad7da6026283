"""Bytes that checkpoints write, as `--checkpoint-every 50 --full-every 20` makes them, beside full
ones alone.

A rank trains a table of 4 million rows with Adam; every step reads ids that are drawn by Zipf's law
with exponent 1.0. What is counted are the files: rows, their optimizer's state, positions, dense
part and metadata. At the end the chain is restored into another model, which must have the bits of
the one that was trained.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

import freescale
from freescale.embedding.optimizers import Adam
from freescale.embedding.sharded_model import ShardedModel
from freescale.train.checkpoint import Checkpoints
from freescale.train.checkpoint.files import read_state
from freescale.transport.local import LocalTransport
from freescale_bench.common.arm import Model, feed
from freescale_bench.common.results import Destination, Row, claim, write
from freescale_bench.common.workload import Workload

EVERY, CYCLE = 50, 20  # steps between checkpoints, checkpoints of a cycle
ROWS, WIDTH = 4_000_000, 32


def make_workload(ids: int, deltas: int) -> Workload:
    """`ids` a step, for a full checkpoint and some deltas."""
    return Workload(
        rows=ROWS,
        width=WIDTH,
        samples=ids // 100,
        median_length=100.0,
        sigma=0.0,
        maximum_length=100,
        popularity=1.0,
        hidden=(8,),
        steps=EVERY * (deltas + 1),
    )


def _build(workload: Workload) -> tuple[ShardedModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = freescale.parallelize(
        Model(workload),
        {"item": ["history"]},
        Adam(),
        transport=LocalTransport(),
        placement="sharded",
    )
    return model, torch.optim.SGD(model.dense_parameters(), lr=0.01)


def measure(ids: int, deltas: int) -> Row:
    """Trains to a full checkpoint and `deltas` that follow it; their bytes."""
    workload = make_workload(ids, deltas)
    with tempfile.TemporaryDirectory() as folder:
        batches = feed(workload, 0, 1)
        model, optimizer = _build(workload)
        checkpoints = Checkpoints(
            Path(folder), model.transport, keep=deltas + 1, full_every=deltas + 1
        )
        pipeline = freescale.Pipeline(model, optimizer, precision="fp32", check=False)
        sizes, changed = [], []
        for result in pipeline.run(batches):
            if result.step % EVERY == 0:
                path = checkpoints.save(model, optimizer, {"step": result.step})
                sizes.append(sum(file.stat().st_size for file in path.iterdir()))
                spans = read_state(path).get("changed")  # one rank's
                changed.append(spans[0]["item"][0] if spans else ROWS)
                print(f"step {result.step}: {sizes[-1]:,} bytes, {changed[-1]:,} rows", flush=True)
            if result.step == workload.steps:
                break
        restored, _ = _build(workload)
        checkpoints.load(checkpoints.find("last"), restored)
        exact = all(
            torch.equal(value, restored.tables.get_local_state("item")[name])
            for name, value in model.tables.get_local_state("item").items()
        )
    full, mean = sizes[0], sum(sizes[1:]) / deltas
    return {
        "ids_per_step": ids,
        "deltas_measured": deltas,
        "full_bytes": full,
        "delta_bytes": sizes[1:],
        "delta_rows": changed[1:],
        "cycle_bytes": full + mean * (CYCLE - 1),
        "full_cycle_bytes": full * CYCLE,
        "fewer": full * CYCLE / (full + mean * (CYCLE - 1)),
        "restored_exactly": exact,
    }


def bench_checkpoint(to: Destination) -> None:
    # Deltas of one workload are of one size, but for the draws: of the larger one, three are made.
    rows = [measure(7_000, CYCLE - 1), measure(200_000, 3)]
    exact = float(all(row["restored_exactly"] for row in rows))
    claims = [
        claim(
            f"bytes of a cycle of {CYCLE} checkpoints, all full, over one full and its deltas: "
            "4 million rows, 7,000 Zipf-1.0 ids a step, a checkpoint every 50 steps",
            10.0,
            rows[0]["fewer"],
            "x",
            at_least=True,
        ),
        claim(
            "the chain restores the bits of the trained table and its row state (1: all)",
            1.0,
            exact,
            "",
            at_least=True,
        ),
    ]
    workload = asdict(make_workload(7_000, CYCLE - 1)) | {"row_optimizer": "adam"}
    write("checkpoint", "cpu", "freescale bench checkpoint", rows, claims, to=to, workload=workload)
