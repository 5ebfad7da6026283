"""metrics.jsonl of a run's folder: a line for each log entry and each evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freescale.train.callbacks import Callback, Metrics, RunView
from freescale.train.run_folder import RunFolder

_TAIL = 1 << 20  # bytes of metrics.jsonl, in which the line of a window is


class MetricsLog(Callback):
    """Writes metrics.jsonl, on rank 0."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def on_log(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        if trainer.rank == 0 and self._folder.is_open:
            append_metrics(trainer.folder, entry)

    def on_window(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        number, folder = entry["stream"]["number"], trainer.folder
        if trainer.rank == 0 and not has_window(folder, "stream", number):
            self.on_log(trainer, entry)

    on_rollback = on_snapshot_interval = on_snapshot_cost = on_log

    def on_evaluation(self, trainer: RunView, metrics: Metrics, part: str) -> None:
        best = trainer.best
        about: dict[str, Any] = {} if trainer.window is None else {"window": trainer.window}
        if part == "validation":
            about["epoch"] = trainer.epoch
            about |= {"best": best.state_dict()} if best is not None else {}
        elif best is not None and best.kept and best.step is not None:
            about["of_step"] = best.step  # its checkpoint is evaluated
        self.on_log(trainer, {"step": trainer.step, **about, part: metrics})


def append_metrics(folder: Path, entry: Mapping[str, Any]) -> None:
    """Adds a line to a run's metrics.jsonl."""
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(to_json(entry) + "\n")


def to_json(entry: Any) -> str:
    """JSON with null for metrics that are not defined (AUC of one class): NaN is not valid JSON."""

    def replace(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: replace(inner) for key, inner in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(replace(entry))


def truncate_logs(folder: Path, step: int) -> None:
    """Removes the lines of an interrupted run after `step`, where it resumes. Lines about restarts
    stay."""
    for name, last in (("metrics.jsonl", step), ("ledger.jsonl", step - 1)):
        path = folder / name
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(True)
            temporary = path.with_suffix(".tmp")
            kept = [line for line in lines if _is_restart(line) or _parse_step(line) <= last]
            temporary.write_text("".join(kept), encoding="utf-8")
            temporary.replace(path)


def was_tested(folder: Path, step: int) -> bool:
    """Whether metrics.jsonl has the metrics of the test part after `step`. An extended run also has
    those of the shorter run."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if '"test"' in line]
    return any("test" in entry and entry["step"] == step for entry in found)


def has_window(folder: Path, kind: str, number: int) -> bool:
    """Whether metrics.jsonl has the line of a window of a stream: with its metrics (`window`), or
    after it was trained (`stream`). Such lines are in order, and the last ones are read alone."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return False
    with open(path, "rb") as file:
        if (begin := path.stat().st_size - _TAIL) > 0:
            file.seek(begin)
            file.readline()
        lines = [line for line in file if line.endswith(b"}\n") and b'"number"' in line]
    return any(json.loads(line).get(kind, {}).get("number") == number for line in lines)


def _is_restart(line: str) -> bool:
    return line.startswith('{"step":') and '"restart": {' in line and line.endswith("}\n")


def _parse_step(line: str) -> float:
    """A half-written last line counts as past everything."""
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf
