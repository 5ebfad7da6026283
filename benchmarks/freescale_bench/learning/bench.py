"""How well a model predicts after few epochs, with the defaults and with one of them at a time put
back to what it was before.

Everything is evaluated on the validation part; the test part is never read. Seeds take turns, so
that a run that is broken off has all arms.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import nn

from freescale.config import ModelConfig, RunConfig
from freescale.train.build import evaluate_part, prepare_data
from freescale.train.trainer import Trainer
from freescale_bench.common.results import Destination, Row, claim, write
from freescale_bench.learning.table import METRICS

DEFAULTS, BEFORE = "defaults", "all of these"
# Of each arm, the settings that it puts back. XAVIER is none: the projections' first values are not
# a setting.
XAVIER = "projections start by Xavier's rule"
ARMS: dict[str, dict[str, Any]] = {
    DEFAULTS: {},
    "rows start with norm 1": {"row_std": ModelConfig.width**-0.5},
    "rows are not scaled as inputs": {"input_scale": 1.0},
    XAVIER: {},
    "inputs are not dropped": {"input_dropout": 0.0},
    "second moments decay by 0.999": {"beta2": 0.999},
}


def bench_learning(data: Path, epochs: int, max_length: int, seeds: int, to: Destination) -> None:
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    together = {name: value for arm in ARMS.values() for name, value in arm.items()}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for arm, settings in (ARMS | {BEFORE: together}).items():
                given = {"data": str(data), "cache": folder, "device": "cpu", "seed": seed}
                given |= {"epochs": epochs, "max_length": max_length, **settings}
                config = RunConfig.from_settings(given)
                found = _measure(config, Path(folder) / f"{arm}-{seed}", arm in (XAVIER, BEFORE))
                rows.append({"arm": arm, "seed": seed, "settings": settings, **found})
                print(rows[-1], flush=True)
    now, before = (
        statistics.mean(row["hr@10/unseen"] for row in rows if row["arm"] == arm)
        for arm in (DEFAULTS, BEFORE)
    )
    write(
        "learning",
        "cpu",
        f"freescale bench learning --data {data.name} --epochs {epochs} --max-length {max_length} "
        f"--seeds {seeds}",
        rows,
        [
            claim(
                "HR@10 (validation, unseen), times that with what the defaults were before",
                1.0,
                now / before,
                "x",
                at_least=True,
            )
        ],
        dataset={"name": data.name, "sha256": digest},
        training={"epochs": epochs, "max_length": max_length},
        to=to,
    )


def _measure(config: RunConfig, folder: Path, xavier: bool) -> dict[str, float]:
    """Trains; metrics of the validation part and seconds of training."""
    histories = prepare_data(config)
    trainer = Trainer(config, folder, histories=histories)
    if xavier:
        for layer in trainer.model.module.encoder.layers:  # type: ignore[union-attr]
            nn.init.xavier_uniform_(layer.projection.weight)
    begin = time.perf_counter()
    for _ in trainer.iterate():
        pass
    seconds = time.perf_counter() - begin
    quality = evaluate_part(trainer.config, trainer.model, histories, "validation")["model"]
    return {"seconds": round(seconds, 1), **{name: quality[name] for name in METRICS}}
