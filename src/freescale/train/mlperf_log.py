"""A run's log in MLPerf's format: a line `:::MLLOG {...}` for each event, with the settings that
the rules of DLRMv4 fix."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freescale.config import RunConfig
from freescale.embedding.optimizers import choose_row_optimizer
from freescale.pipeline.step_result import StepResult
from freescale.train.callbacks import Callback, Metrics, RunView
from freescale.train.metrics_log import to_json

TOKEN = ":::MLLOG "
BENCHMARK = "dlrmv4"
TARGET = 0.75  # AUC at which the run ends
_DENSE_EPS = 1e-8  # of torch's AdamW
_KINDS = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
_PRECISIONS = {"bf16": "bfloat16"}


class MLPerfLog(Callback):
    """Writes the log on rank 0, and ends the run at the first validation that reaches the target. A
    resumed run continues its log. Initialization counts from the construction of this object."""

    def __init__(self, path: str | Path, config: RunConfig, target: float = TARGET) -> None:
        if config.model.task != "ranking":
            raise ValueError("--mlperf-log needs --task ranking, whose AUC the rules measure")
        self._path, self._target = Path(path), target
        self._metric = f"auc/{config.label_names[0]}"
        self._begun = self._stepped = _read_clock()
        self._samples = 0  # trained on
        self._is_done = False

    def on_start(self, trainer: RunView) -> None:
        self._samples = trainer.step * trainer.config.train.global_batch
        if trainer.rank:
            return
        if not trainer.step:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("", encoding="utf-8")
            self._write("cache_clear", True, at=self._begun)
            self._write("init_start", at=self._begun)
            for key, value in list_settings(trainer).items():
                self._write(key, value)
            self._write("init_stop")
            self._write("run_start")
        self._write("block_start", about=self._count(trainer))

    def on_step(self, trainer: RunView, step: StepResult) -> None:
        self._samples += trainer.data.batch_size(step.batch_number)
        self._stepped = _read_clock()

    def on_evaluation(self, trainer: RunView, metrics: Metrics, part: str) -> None:
        if part != "validation" or self._is_done:
            return
        about, value = self._count(trainer), metrics["model"].get(self._metric, float("nan"))
        self._is_done = value >= self._target
        if trainer.rank == 0:
            for key in ("block_stop", "eval_start"):  # an evaluation begins right after a step
                self._write(key, about=about, at=self._stepped)
            self._write("eval_accuracy", value, about)
            self._write("eval_stop", about=about)
            if self._is_done:
                self._write("run_stop", about=about | {"status": "success"})
            else:
                self._write("block_start", about=about)
        if self._is_done:
            trainer.stop()

    def on_end(self, trainer: RunView, results: Mapping[str, Any]) -> None:
        if trainer.rank == 0 and not self._is_done:
            about = self._count(trainer)
            self._write("block_stop", about=about)
            self._write("run_stop", about=about | {"status": "aborted"})

    def _count(self, trainer: RunView) -> dict[str, Any]:
        share = self._samples / trainer.data.num_samples
        return {"samples_count": self._samples, "epoch_num": share}

    def _write(
        self,
        key: str,
        value: Any = None,
        about: Mapping[str, Any] | None = None,
        at: int | None = None,
    ) -> None:
        entry = {
            "namespace": "",
            "time_ms": at or _read_clock(),
            "event_type": _KINDS.get(key.rpartition("_")[2], "POINT_IN_TIME"),
            "key": key,
            "value": value,
            "metadata": {"file": __file__, "lineno": 0, **(about or {})},
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(TOKEN + to_json(entry) + "\n")


def list_settings(trainer: RunView) -> dict[str, Any]:
    """What a submission is, and the settings that the rules check, by MLPerf's keys. The order
    matters: the learning rate is checked against the batch before it."""
    config, train = trainer.config, trainer.config.train
    rows = choose_row_optimizer(train)
    computed = trainer.pipeline.precision
    sent = "bf16" if train.wire_precision == "bf16" else "fp32"
    samples = trainer.data.num_samples
    rank_samples = train.global_batch // (trainer.transport.world * train.accumulate)
    return {
        "submission_benchmark": BENCHMARK,
        "submission_org": "FreeScale",
        "submission_division": "closed",
        "submission_status": "research",
        "submission_platform": trainer.transport.device.type,
        "seed": train.seed,
        "global_batch_size": train.global_batch,
        "gradient_accumulation_steps": train.accumulate,
        "micro_batch_size": max(1, rank_samples),
        "train_samples": samples,
        "eval_samples": samples,
        "max_sequence_length": trainer.model.module.encoder.max_length,  # type: ignore[union-attr]
        "opt_name": "AdamW" if train.weight_decay else "Adam",
        "opt_base_learning_rate": train.lr,
        "opt_adam_beta_1": train.beta1,
        "opt_adam_beta_2": train.beta2,
        "opt_adam_epsilon": _DENSE_EPS,
        "opt_weight_decay": train.weight_decay,
        "opt_gradient_clip_norm": train.clip,
        "opt_sparse_name": rows.name,
        "opt_sparse_base_learning_rate": train.row_lr,
        "opt_sparse_epsilon": getattr(rows, "eps", None),
        "opt_learning_rate_warmup_steps": train.warmup,
        "opt_learning_rate_warmup_start_lr": 0.0,
        "eval_every_data_pct": float(train.evaluate_every or train.epochs),
        **{
            f"lowest_numerical_precision_in_{part}": _PRECISIONS.get(name, name)
            for part, name in (("linear", computed), ("attn", computed), ("comm", sent))
        },
        **{f"{kind}_parallelism": 1 for kind in ("tensor", "pipeline", "context", "expert")},
        "config_filename": config.model.recipe or "config.json",
    }


def _read_clock() -> int:
    return int(time.time() * 1000)
