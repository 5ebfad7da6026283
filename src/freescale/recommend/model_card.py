"""The model card of an export: data, model, training, metrics and limits, for programs and for
people."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import freescale
from freescale.config import RunConfig
from freescale.config.metrics import select_headlines
from freescale.config.time_order import DEFAULT_WINDOW
from freescale.recommend.loading import Loaded

_PARTS = ("validation", "test")
_ENCODER = ("encoder", "width", "layers", "heads", "position_bias", "time_bias", "dropout")
_MODEL = (*_ENCODER, "temperature")
_TRAINING = (
    *("epochs", "steps", "global_batch", "lr", "row_lr", "row_optimizer", "warmup", "decay"),
    *("precision", "seed"),
)


def describe_model(loaded: Loaded) -> dict[str, Any]:
    """What `model_card.json` holds, of the checkpoint of a run."""
    checkpoint, histories, config = loaded.checkpoint, loaded.histories, loaded.config
    assert checkpoint is not None and histories is not None, "an export of a run"
    step, features = checkpoint.state["progress"]["step"], loaded.features
    written = max(path.stat().st_mtime for path in checkpoint.path.iterdir())
    tables = {"item", "action", "event_features", "user_features", "context_features"}
    counts = {True: 0, False: 0}
    for name, parameter in loaded.module.named_parameters():
        counts[name.partition(".")[0] in tables] += parameter.numel()
    sources = {} if features is None else {
        source: [each.feature.name for each in getattr(features, source)]
        for source in ("item", "user", "event", "context")
    }  # fmt: skip
    return {
        "name": loaded.folder.resolve().name,
        "task": config.model.task,
        "tasks": list(config.label_names),
        "trained": datetime.fromtimestamp(written, UTC).date().isoformat(),
        "step": step,
        "freescale": freescale.__version__,
        "torch": torch.__version__,
        "data": {
            "source": Path(config.data.data).name,
            "users": histories.num_samples,
            "events": round(histories.mean_length * histories.num_samples),
            "items": len(loaded.catalogue.listed),
            "split": "windows" if config.data.order == "time" else config.data.split,
            "split_time": config.data.split_time,
            "max_length": config.data.max_length,
            "time_unit": loaded.time_unit,
            "features": sources,
        },
        "model": {name: getattr(config.model, name) for name in _MODEL}
        | {"parameters": counts[False], "table_parameters": counts[True]},
        "training": {name: getattr(config.train, name) for name in _TRAINING},
        "metrics": read_metrics(loaded.folder, step, checkpoint.path.name),
        "limits": _list_limits(config),
    }


def read_metrics(folder: Path, step: int, checkpoint: str) -> dict[str, Any]:
    """The evaluations of a checkpoint of a run: {part: {"model": {metric: value}, ...}}. Those of
    other data than the run's have its digest in the name of the part."""
    found: dict[str, Any] = {}
    log = folder / "metrics.jsonl"
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else ():
        entry = json.loads(line)
        for part in _PARTS:
            if part in entry and entry.get("of_step", entry["step"]) == step:
                found[part] = entry[part]
    for path in sorted(folder.glob("eval-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["checkpoint"] == checkpoint:
            found[path.stem.removeprefix("eval-")] = result["quality"]
    return found


def _list_limits(config: RunConfig) -> list[str]:
    found = [
        f"The model reads the last {config.data.max_length} events of a history.",
        "Metrics are of recorded events, which nobody chose from the model's recommendations.",
        "Items without a training event are known by their features, or not at all.",
    ]
    if config.model.task == "retrieval":
        found.append("A history without a known item gives a query of zeros, which ranks nothing.")
    if config.data.order == "time":
        length = config.data.window or DEFAULT_WINDOW
        found.append(f"Events of the last window of {length} were not trained on.")
    elif config.data.split != "none":
        found.append(f"Held-out events (--split {config.data.split}) were not trained on.")
    return found


def render_card(card: dict[str, Any]) -> str:
    """The card as Markdown."""
    lines = [
        f"# {card['name']}",
        "",
        f"A {card['task']} model, trained with FreeScale {card['freescale']} until "
        f"{card['trained']} ({card['step']:,} steps).",
    ]
    for part in ("data", "model", "training"):
        lines += ["", f"## {part.capitalize()}", ""]
        lines += [f"- {name.replace('_', ' ')}: {_render(v)}" for name, v in card[part].items()]
    lines += ["", "## Metrics", ""]
    if not card["metrics"]:
        lines += ["This checkpoint was not evaluated. `freescale eval` does it.", ""]
    for part, quality in card["metrics"].items():
        names = select_headlines(quality["model"])
        lines += [f"| {part} part | {' | '.join(quality)} |", "|---" * (len(quality) + 1) + "|"]
        for name in names:
            values = (_render(each.get(name)) for each in quality.values())
            lines += [f"| {name} | {' | '.join(values)} |"]
        lines += [""]
    lines += ["## Limits", "", *(f"- {limit}" for limit in card["limits"])]
    return "\n".join(lines) + "\n"


def _render(value: Any) -> str:
    if isinstance(value, dict):
        parts = [f"{name} {_render(inner)}" for name, inner in value.items() if inner]
        return "; ".join(parts) or "none"
    if isinstance(value, list):
        return ", ".join(map(_render, value)) or "none"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        f"{value:,}"
        if isinstance(value, int)
        else f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
    )
