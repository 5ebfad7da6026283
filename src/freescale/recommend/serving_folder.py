"""The files of an export with which a service that has only torch runs the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch

from freescale.config.features import KEPT_SCHEMA
from freescale.data.catalogue import read_texts
from freescale.data.features.store import ABOUT, FOLDER
from freescale.data.ingest.ids import VOCABULARY
from freescale.models.heads import Ranking, Retrieval
from freescale.recommend import example
from freescale.recommend.compiled_program import SERVING, compile_program
from freescale.recommend.loading import Loaded
from freescale.recommend.model_card import describe_model, render_card
from freescale.recommend.portable import Input, PaddedHead, trace

_VERSION = 1
PROGRAM, COMPILED, VECTORS, IDS = "encoder.pt2", "encoder-aot.pt2", "item_vectors.pt", "items.json"
CARD, CARD_TEXT, EXAMPLE = "model_card.json", "MODEL_CARD.md", "example.py"
FILES = (PROGRAM, COMPILED, VECTORS, IDS, SERVING, CARD, CARD_TEXT, EXAMPLE)


def write_serving(loaded: Loaded, out: Path, aot: str | None = None) -> Iterator[Path]:
    """Writes into the folder of an export what a service needs: the model as a program of torch,
    vectors and ids of the items, a description of all inputs, a model card and an example.

    Args:
        loaded: a run.
        out: the folder.
        aot: `cpu` or `cuda`: also compile the program for this machine.

    Raises:
        ValueError: the model has no portable form, or cannot be compiled here.
    """
    module: Any = loaded.module
    head = PaddedHead(module)
    inputs = head.list_inputs(_count_places(loaded))
    program = trace(head, inputs)
    torch.export.save(program, out / PROGRAM)
    yield out / PROGRAM
    about = describe_serving(loaded, module, inputs)
    if aot is not None:
        needed = compile_program(program, head, inputs, out / COMPILED, aot)
        about["aot"] = {"program": COMPILED, "requirements": needed}
        yield out / COMPILED
    if isinstance(module, Retrieval):
        with torch.no_grad():
            vectors = module.encode_items(module.item.weight[: len(loaded.catalogue)])
        torch.save(vectors.clone(), out / VECTORS)
        yield out / VECTORS
    (out / IDS).write_text(json.dumps(loaded.catalogue.ids.to_pylist()), encoding="utf-8")
    yield out / IDS
    card = describe_model(loaded)
    for name, value in ((SERVING, about), (CARD, card)):
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        (out / name).write_text(text, encoding="utf-8")
        yield out / name
    (out / CARD_TEXT).write_text(render_card(card), encoding="utf-8")
    yield out / CARD_TEXT
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
