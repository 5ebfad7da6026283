"""A rank that trains a shape of `freescale bench train` like `freescale train`, for benchmarks that
time steps themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from freescale.batch import SequenceBatch
from freescale.config import RunConfig
from freescale.data.batches.loader import Histories
from freescale.embedding.sharded_model import ShardedModel
from freescale.pipeline.pipeline import Pipeline
from freescale.train.build import (
    build_model,
    build_optimizer,
    build_pipeline,
    load_histories,
    prepare_data,
)
from freescale.transport.api import Transport
from freescale_bench.common.turns import wait_idle
from freescale_bench.train.measure import build_config
from freescale_bench.train.shapes import Shape, write_interactions

WARMUP, WINDOW = 20, 10  # steps; a window is timed as a whole
AFTER = 3  # extra batches, for the stages that prepare ahead
SMALL = Shape("trial", 8, 32, 1, 2, cap=60, median=40, negatives=2)  # on a CPU, to try the code


def prepare(
    shape: Shape,
    folder: Path,
    transport: Transport,
    *,
    data: Mapping[str, Any],
    train: Mapping[str, Any],
    name: str = "interactions",
    popularity: float | None = 1.0,
) -> tuple[RunConfig, Histories]:
    """Prepares the data, written by rank 0 to a shared folder. A collective.

    Args:
        data: settings in addition to the shape's; `train`: likewise.
        popularity: of items, as for `write_interactions`.
    """
    file = folder / f"{name}.parquet"
    if transport.rank == 0:
        write_interactions(shape, file, popularity=popularity)
    transport.gather_bytes(b"")
    config = build_config(shape, file, folder / "cache", transport.device.type, 10**6)
    config = replace(
        config, data=replace(config.data, **data), train=replace(config.train, **train)
    )
    return config, load_histories(config, prepare_data(config), transport)


@dataclass(frozen=True)
class Trained:
    """The model of a rank, and what trains it."""

    model: ShardedModel
    optimizer: torch.optim.Optimizer
    pipeline: Pipeline

    @staticmethod
    def build(config: RunConfig, data: Histories, transport: Transport) -> Trained:
        model = build_model(config, data, transport)
        optimizer = build_optimizer(config, model)
        return Trained(model, optimizer, build_pipeline(config, model, optimizer, 10**6))

    def time_windows(
        self, batches: Sequence[SequenceBatch], steps: int, warmup: int = WARMUP
    ) -> tuple[list[float], list[dict[str, Any]]]:
        """Returns milliseconds per step of each window, and the ledger's records of these steps."""
        windows: list[float] = []
        records: list[dict[str, Any]] = []
        begin = 0.0
        for number, _ in enumerate(self.pipeline.run(batches), start=1 - warmup):
            if number % WINDOW or not 0 <= number <= steps:
                continue
            wait_idle(self.model.transport.device)
            now, drained = time.perf_counter(), self.pipeline.ledger.drain()
            if number:
                windows.append(1e3 * (now - begin) / WINDOW)
                records += drained
            begin = time.perf_counter()
        self.pipeline.ledger.drain()
        return windows, records


def list_batches(
    data: Histories, steps: int, device: str, warmup: int = WARMUP
) -> list[SequenceBatch]:
    """Lists the batches of the warm-up, of whole windows within `steps`, and of the steps after
    them."""
    count = warmup + steps // WINDOW * WINDOW + AFTER
    made = (data.batch(number) for number in range(count))
    return [batch.pin_memory() if device == "cuda" else batch for batch in made]
