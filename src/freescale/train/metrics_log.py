"""metrics.jsonl of a run's folder: a line for each log entry and each evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freescale.train.callbacks import Callback, Metrics

if TYPE_CHECKING:
    from freescale.train.trainer import Trainer


class MetricsLog(Callback):
    """Writes metrics.jsonl, on rank 0."""

    def on_log(self, trainer: Trainer, entry: Mapping[str, Any]) -> None:
        self._append(trainer, entry)

    def on_rollback(self, trainer: Trainer, entry: Mapping[str, Any]) -> None:
        self._append(trainer, entry)

    def on_snapshot_interval(self, trainer: Trainer, entry: Mapping[str, Any]) -> None:
        self._append(trainer, entry)

    def on_snapshot_cost(self, trainer: Trainer, entry: Mapping[str, Any]) -> None:
        self._append(trainer, entry)

    def on_evaluation(self, trainer: Trainer, metrics: Metrics, part: str) -> None:
        best = trainer.best
        about: dict[str, Any] = {}
        if part == "validation":
            about["epoch"] = trainer.epoch
            about |= {"best": best.state_dict()} if best is not None else {}
        elif best is not None and best.kept and best.step is not None:
            about["of_step"] = best.step  # whose checkpoint is evaluated
        self._append(trainer, {"step": trainer.step, **about, part: metrics})

    def _append(self, trainer: Trainer, entry: Mapping[str, Any]) -> None:
        if trainer.rank == 0 and trainer.run_folder.is_open:
            append_metrics(trainer.folder, entry)


def append_metrics(folder: Path, entry: Mapping[str, Any]) -> None:
    """Adds a line to a run's metrics.jsonl."""
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(to_json(entry) + "\n")


def to_json(entry: Any) -> str:
    """JSON in which a metric that is not defined (AUC of one class) is null: NaN is no JSON."""

    def replace(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: replace(inner) for key, inner in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(replace(entry))


def truncate_logs(folder: Path, step: int) -> None:
    """Removes lines that an interrupted run wrote after `step`, from which another goes on. What is
    written of restarts stays."""
    for name, last in (("metrics.jsonl", step), ("ledger.jsonl", step - 1)):
        path = folder / name
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(True)
            temporary = path.with_suffix(".tmp")
            kept = [line for line in lines if _is_restart(line) or _parse_step(line) <= last]
            temporary.write_text("".join(kept), encoding="utf-8")
            temporary.replace(path)


def was_tested(folder: Path, step: int) -> bool:
    """Whether metrics.jsonl has the metrics of the test part after `step`. A run that was extended
    has those of the shorter run, too."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if '"test"' in line]
    return any("test" in entry and entry["step"] == step for entry in found)


def _is_restart(line: str) -> bool:
    return line.startswith('{"step":') and '"restart": {' in line and line.endswith("}\n")


def _parse_step(line: str) -> float:
    """A half-written last line counts as past everything."""
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf
