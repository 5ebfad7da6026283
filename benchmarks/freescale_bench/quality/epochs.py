"""Seconds of the first epochs of a recipe, and of the peer as it was published: each alone on the
device, on the same events."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freescale.ledger.machine import get_gpu_name
from freescale.train.callbacks import Callback, RunView
from freescale_bench.common.results import Destination, claim, write
from freescale_bench.quality.peer import find_config, write_interactions

if TYPE_CHECKING:
    from freescale.pipeline.step_result import StepResult
    from freescale_bench.quality.bench import Plan

TIMES_FASTER = 10.0


class _EpochTimes(Callback):
    """When training begins and when each epoch ends; kernels are compiled before."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self.marks: list[float] = []

    def on_start(self, trainer: RunView) -> None:
        self.marks.append(time.perf_counter())

    def on_step(self, trainer: RunView, step: StepResult) -> None:
        if step.step % (trainer.total // self._epochs) == 0:
            if trainer.transport.device.type == "cuda":
                import torch

                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]


def bench_epochs(plan: Plan, epochs: int, to: Destination) -> None:
    """Trains `epochs` epochs of the recipe's first seed, then of the peer.

    Raises:
        ValueError: without a peer, or if it fails.
    """
    if plan.peer is None:
        raise ValueError("--epochs-alone compares with a peer: --peer FOLDER")
    from freescale.train.build import prepare_data
    from freescale.train.trainer import Trainer

    seed = replace(plan, changes=[*plan.changes, f"epochs={epochs}"]).list_seeds()[0]
    histories = prepare_data(seed.config)
    watch = _EpochTimes(epochs)
    trainer = Trainer(
        seed.config, plan.folder / f"epochs-{time.time_ns()}", histories=histories,
        callbacks=[watch],
    )  # fmt: skip
    trainer.train()
    device = trainer.transport.device.type
    data = plan.folder / "interactions.parquet"
    if not data.exists():
        write_interactions(histories, data)
    peer = _train_peer(plan.peer, find_config(plan.recipe, plan.peer_config), data, epochs, device)
    own = sum(watch.seconds)
    rows: list[dict[str, Any]] = [
        {"arm": plan.arm, "seconds": own, "epochs": watch.seconds, "steps": trainer.total},
        {
            "arm": "public HSTU as published",
            "seconds": peer["train_seconds"],
            "first_epoch_seconds": peer["first_epoch_seconds"],
            "epoch_seconds_median": peer["epoch_seconds_median"],
            "steps": peer["steps_per_epoch"] * epochs,
        },
    ]
    text = f"{plan.arm} on {plan.name}: {epochs} epochs alone, times faster than the peer"
    ratio = peer["train_seconds"] / own
    write(
        "quality",
        f"{plan.arm}-{plan.name}-epochs-{get_gpu_name() if device == 'cuda' else 'cpu'}",
        f"{plan.describe_command()} --epochs-alone {epochs}",
        rows,
        [claim(text, TIMES_FASTER, ratio, "x", at_least=True)],
        to=to,
        method="seconds of training, without what comes before it: start, data, kernels to compile",
    )


def _train_peer(folder: Path, config: str, data: Path, epochs: int, device: str) -> dict[str, Any]:
    command = [sys.executable, str(folder / "run_gr.py"), "--data", str(data), "--config", config]
    command += ["--epochs", str(epochs), "--device", device, "--as-published", "--eval-every", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise ValueError(f"the peer failed: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
