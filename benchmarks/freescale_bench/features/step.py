"""Step time with and without a categorical feature of items. The arms train the same events, in
turns of one process; windows of steps are compared pairwise."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from freescale.train.build import load_histories, prepare_data
from freescale.transport.api import Transport
from freescale_bench.common.ranks import get_gpu_name, open_rank
from freescale_bench.common.results import Claim, Destination, Row, at_most, spread, write
from freescale_bench.train.shapes import SHAPES, Shape
from freescale_bench.train.trained import SMALL, WARMUP, Trained, list_batches, prepare

VALUES = 1000  # of the feature
TURNS = 3  # of each arm
LIMIT = 600.0  # seconds: limit of a collective
_MOST = {"cuda": 5.0, "cpu": 10.0}  # percent of a step: targets


def bench_step(device: str, shapes: Sequence[str] | None, steps: int, to: Destination) -> None:
    known = {**SHAPES, SMALL.name: SMALL}
    wanted = shapes or (["short", "long"] if device == "cuda" else [SMALL.name])
    rows: list[Row] = []
    claims: list[Claim] = []
    with open_rank(device, LIMIT) as (transport, folder):
        for name in wanted:
            found = _measure_shape(known[name], steps, transport, folder)
            rows.append({"shape": name, **found})
            text = f"{name}: step with a feature of {VALUES:,} values, longer than without"
            claims.append(at_most(text, _MOST[device], found["more_percent"], "%"))
    command = f"freescale bench features step --device {device} --steps {steps}"
    gpu = get_gpu_name() if device == "cuda" else "cpu"
    write("features-step", gpu, command, rows, claims, ["triton"], to=to)


def _measure_shape(shape: Shape, steps: int, transport: Transport, folder: Path) -> dict[str, Any]:
    config, data = prepare(shape, folder, transport, data={}, train={}, name=shape.name)
    ids = np.arange(data.num_items)
    items = folder / f"{shape.name}-items.parquet"
    category = np.char.add("c", (ids * 7919 % VALUES).astype(str))
    pq.write_table(pa.table({"item_id": ids, "category": category}), items)
    described = replace(config, data=replace(config.data, items=str(items)))
    featured = load_histories(described, prepare_data(described), transport)
    arms = {"plain": (config, data), "features": (described, featured)}
    device = transport.device.type
    warmup = shape.warmup if device == "cuda" else WARMUP  # on a CPU nothing is captured
    batches = {
        arm: list_batches(source, steps, device, warmup) for arm, (_, source) in arms.items()
    }
    windows: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(TURNS):
        for arm in list(arms) if turn % 2 else reversed(list(arms)):
            trained = Trained.build(*arms[arm], transport)
            trained.model.tables.place(batches[arm][0])
            try:
                windows[arm] += trained.time_windows(batches[arm], steps, warmup)[0]
            finally:
                trained.pipeline.close()
            del trained
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    pairs = zip(windows["features"], windows["plain"], strict=True)
    return {
        "values": VALUES,
        "step_ms": spread(windows["plain"]),
        "step_ms_with_feature": spread(windows["features"]),
        "more_percent": 100 * (statistics.median(mine / other for mine, other in pairs) - 1),
    }
