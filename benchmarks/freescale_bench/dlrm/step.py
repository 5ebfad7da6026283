"""Training steps of dlrm_v4_hstu on one GPU, which has an eighth of every table: samples/s, TFLOP/s
by MLPerf's formula, memory, and the slowest kernels.

Samples all have 4,096 tokens, or Yambda's spread of lengths in batches of about as many tokens.
Rows are trained by row-wise Adagrad, everything else by Adam. The public model, if there is one,
has no tables: it gets rows as inputs and leaves their gradients, which favours it.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import torch

import freescale
from freescale.pipeline.dense.local import AdamW
from freescale.pipeline.pipeline import Pipeline
from freescale.transport.api import Transport
from freescale_bench.common.ranks import get_gpu_name, open_rank, require_gpu
from freescale_bench.common.results import Destination, Row, at_least, write
from freescale_bench.dlrm.measure import ADAM, Data, time_steps
from freescale_bench.dlrm.public_step import measure_public
from freescale_bench.dlrm.shapes import FULL, SMALL, Shape, build_model

LIMIT = 600.0  # seconds: limit of a collective
PARTS = 8  # GPUs that share the tables
SAMPLES = 128


def bench_step(
    device: str, samples: int | None, public: Path | None, trial: bool, to: Destination
) -> None:
    require_gpu(device)
    if device == "cpu" and not trial:
        raise ValueError("the model is for a GPU: --device cuda, or --trial for tiny sizes")
    shape = SMALL if trial else FULL.divide(PARTS)
    count = samples or (4 if trial else SAMPLES)
    data = [Data.make(shape, count, mixed, device == "cuda") for mixed in (False, True)]
    with open_rank(device, LIMIT) as (transport, _):
        rows = _measure_here(shape, data, transport)
    if not trial:  # kept if the public model fails
        _write(rows, device, to)
    if public is None:
        return
    gc.collect()  # the tables
    if device == "cuda":
        torch.cuda.empty_cache()
    for row in measure_public(shape, data[:1], public, device):
        rows.append(_show(row))
    if not trial:
        _write(rows, device, to)


def _show(row: Row) -> Row:
    print({name: value for name, value in row.items() if name != "slowest_kernels"}, flush=True)
    return row


def _write(rows: Sequence[Row], device: str, to: Destination) -> None:
    first, others = rows[0], [row for row in rows if str(row["arm"]).startswith("public")]
    text = "TFLOP/s at 4,096 tokens, by MLPerf's formula"
    claims = [at_least(text, 400, first["tflop_per_s"], "TFLOP/s")]
    for row in others:
        gain = first["samples_per_second"] / row["samples_per_second"]
        text = "samples/s at 4,096 tokens, those of the public modules"
        claims.append(at_least(text, 1.5, gain, "times"))
    command = f"freescale bench dlrm step --device {device}"
    write("dlrm-step", get_gpu_name(), command, rows, claims, ["triton"], to=to)


def _measure_here(shape: Shape, data: Sequence[Data], transport: Transport) -> list[Row]:
    torch.manual_seed(0)
    model = build_model(shape, table_device="meta")
    sharded = freescale.parallelize(
        model, model.features, freescale.RowWiseAdagrad(lr=1e-6, eps=1e-8), transport=transport,
        init_std=0.02, row_clip=None,
    )  # fmt: skip
    dense = AdamW(sharded.dense_parameters(), weight_decay=0.0, **ADAM)
    on_gpu = transport.device.type == "cuda"
    pipeline = Pipeline(
        sharded, dense, clip=1.0, precision="bf16" if on_gpu else "fp32", check=False
    )
    rows = []
    for each in data:
        steps = pipeline.run(each.repeat())
        windows, more = time_steps(steps, on_gpu)
        row = {"arm": "freescale", **each.describe(shape, windows), **more}
        row["loss"] = [result.loss for result in steps][-1]
        rows.append(_show(row))
        pipeline.flush()
    rows[0]["rows"] = {spec.name: spec.rows for spec in sharded.tables.specs.values()}
    pipeline.close()
    return rows
