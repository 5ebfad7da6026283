"""The files of an export with which a service that has only torch runs the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch

import freescale
from freescale.config import RunConfig
from freescale.config.features import KEPT_SCHEMA
from freescale.config.time_order import DEFAULT_WINDOW
from freescale.data.catalogue import read_texts
from freescale.data.features.store import ABOUT, FOLDER
from freescale.data.ingest.ids import VOCABULARY
from freescale.data.store.event_store import EventStore
from freescale.models.heads import Ranking, Retrieval
from freescale.recommend import example
from freescale.recommend.known_users import open_users
from freescale.recommend.loading import Loaded
from freescale.recommend.portable import Input, PaddedHead, trace

_PARTS = ("validation", "test")
_ENCODER = ("encoder", "width", "layers", "heads", "position_bias", "time_bias", "dropout")
_MODEL = (*_ENCODER, "temperature")
_TRAINING = (
    *("epochs", "steps", "global_batch", "lr", "row_lr", "row_optimizer", "warmup", "decay"),
    *("precision", "seed"),
)
_VERSION = 1
SERVING, PROGRAM, VECTORS, IDS = "serving.json", "encoder.pt2", "item_vectors.pt", "items.json"
CARD, EXAMPLE = "model_card.json", "example.py"
FILES = (PROGRAM, VECTORS, IDS, SERVING, CARD, EXAMPLE)


def write_serving(loaded: Loaded, out: Path) -> Iterator[Path]:
    """Writes into the folder of an export what a service needs: the model as a program of torch,
    vectors and ids of the items, a description of all inputs, a model card and an example.

    Args:
        loaded: a run.
        out: the folder.

    Raises:
        ValueError: the model has no portable form.
    """
    module: Any = loaded.module
    head = PaddedHead(module)
    inputs = head.list_inputs(_count_places(loaded))
    torch.export.save(trace(head, inputs), out / PROGRAM)
    yield out / PROGRAM
    about = describe_serving(loaded, module, inputs)
    if isinstance(module, Retrieval):
        with torch.no_grad():
            vectors = module.encode_items(module.item.weight[: len(loaded.catalogue)])
        torch.save(vectors.clone(), out / VECTORS)
        yield out / VECTORS
    (out / IDS).write_text(json.dumps(loaded.catalogue.ids.to_pylist()), encoding="utf-8")
    yield out / IDS
    for name, value in ((SERVING, about), (CARD, describe_model(loaded))):
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        (out / name).write_text(text, encoding="utf-8")
        yield out / name
    yield Path(copyfile(example.__file__, out / EXAMPLE))


def remove_serving(out: Path) -> None:
    """Removes what an earlier export wrote for serving."""
    for name in FILES:
        (out / name).unlink(missing_ok=True)


def describe_serving(
    loaded: Loaded, module: Retrieval | Ranking, inputs: list[Input]
) -> dict[str, Any]:
    """What `serving.json` holds."""
    config, actions = loaded.config, read_texts(loaded.vocabulary, "action")
    retrieval, count = isinstance(module, Retrieval), len(loaded.catalogue)
    shape = ["batch", config.model.width] if retrieval else ["batch", "candidates", "tasks"]
    meaning = (
        "queries: a score is the product with the vector of an item; higher is better"
        if retrieval
        else "the probability of each task for each candidate"
    )
    found: dict[str, Any] = {
        "version": _VERSION,
        "task": config.model.task,
        "tasks": list(config.label_names),
        "torch": torch.__version__,
        "program": PROGRAM,
        "inputs": [each.describe() for each in inputs],
        "output": {"dtype": "float32", "shape": shape, "meaning": meaning},
        "max_length": config.data.max_length,
        "time_unit": loaded.time_unit,
        "items": {
            "ids": IDS,  # null: never recommended
            "vectors": VECTORS if retrieval else None,
            "count": count,
            # of a dynamic table: the row of any other item
            "unknown": count if module.item.weight.shape[0] > count else None,
        },
        "actions": None
        if actions is None
        else dict(zip(actions[1].to_pylist(), actions[0].tolist())),
        "vocabulary": None if loaded.vocabulary is None else VOCABULARY,
        "features": None if loaded.features is None else f"{FOLDER}/{ABOUT}",
        "schema": KEPT_SCHEMA if (loaded.folder / KEPT_SCHEMA).is_file() else None,
        "example": _make_example(loaded, inputs),
    }
    if retrieval:
        found |= {"normalize": module.normalize, "temperature": module.temperature}
    return found


def _count_places(loaded: Loaded) -> dict[str, int]:
    features = loaded.features
    if features is None:
        return {}
    sources = {"event": features.event, "context": features.context}
    return {name: sum(each.places for each in fitted) for name, fitted in sources.items()}


def _make_example(loaded: Loaded, inputs: list[Input]) -> dict[str, Any]:
    """A request of three popular items, with zeros for everything else."""
    items = loaded.catalogue.restore(loaded.catalogue.popular[:3])
    found: dict[str, Any] = {}
    for each in inputs:
        if each.name in ("items", "candidates"):
            found[each.name] = items
        elif each.name != "lengths":
            shape = [len(items) if isinstance(axis, str) else axis for axis in each.shape[1:]]
            found[each.name] = torch.zeros(shape, dtype=torch.int64).tolist()
    return found


# ---- the model card


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
            "users": len(open_users(loaded)),
            "events": histories.num_events
            if isinstance(histories, EventStore)
            else round(histories.mean_length * histories.num_samples),
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
