"""Loads a run or an export as one plain model on one device."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from freescale.config import RunConfig
from freescale.data.catalogue import Catalogue
from freescale.data.features.store import ABOUT, FOLDER, FeatureStore
from freescale.data.histories import HistoriesFile
from freescale.data.ingest.ids import VOCABULARY
from freescale.data.store.event_store import EventStore, open_growing
from freescale.data.stream.stream import FIRST, HISTORIES, STORE, STREAM
from freescale.models.features import FeatureTables
from freescale.stores.runs import find_checkpoints, open_run
from freescale.train.build import (
    build_module,
    load_features,
    prepare_data,
    size_tables,
)
from freescale.train.export import read_weights
from freescale.train.export_folder import EXPORT, RunData
from freescale.train.state.intact import Intact, find_checkpoint
from freescale.transport.local import LocalTransport

_MOST_ACTIONS = 1 << 20
_AT_ONCE = 1 << 16  # items whose features are summed at a time

Weights = dict[str, dict[str, Tensor]]  # by file of an export, without its ending


@dataclass(frozen=True)
class Loaded:
    """A trained model with everything around it that recommending needs.

    Attributes:
        folder: of the run or export.
        config: its settings.
        module: `Retrieval` or `Ranking` in plain torch, float32. Features of items are part of its
            item table, so that batches have item rows alone.
        catalogue: the items.
        features: of users, events and requests; None without features.
        vocabulary: texts of users and actions; None if they are integers.
        histories: of a run, those of its data, or the events of its stream; None for an export.
        time_unit: of timestamps; None if it is not known.
        checkpoint: of a run; None for an export.
        described: of a run, its data.
        texts: the vocabulary of a `Subscriber`, whose file may be of another state, or gone.
    """

    folder: Path
    config: RunConfig
    module: nn.Module
    catalogue: Catalogue
    features: FeatureStore | None
    vocabulary: Path | None
    histories: HistoriesFile | EventStore | None
    time_unit: str | None
    checkpoint: Intact | None
    described: RunData | None = None
    texts: pa.Table | None = None


def load_model(folder: Path, checkpoint: str | None = None, data: str | None = None) -> Loaded:
    """Loads a run, with the checkpoint of a name that `find_checkpoint` understands, or an export.
    `data`: where the run's data is, if it has moved.

    Raises:
        ValueError: the folder holds neither, or the run's data is missing.
    """
    folder = open_run(folder)
    if (folder / EXPORT).is_file():
        return _load_export(folder)
    if not (folder / "config.json").is_file():
        if (folder / "dense.safetensors").is_file():
            raise ValueError(
                f"{folder} holds weights alone: export the run again, where its data is, and the "
                "export describes itself"
            )
        raise ValueError(
            f"{folder} holds no checkpoint and no export: name the folder of a run, or of an export"
        )
    return _load_run(folder, checkpoint, data)


def _load_run(folder: Path, checkpoint: str | None, data: str | None) -> Loaded:
    config = RunConfig.read(folder)
    if data is not None:
        config = replace(config, data=replace(config.data, data=data))
    found = find_checkpoint(find_checkpoints(folder), checkpoint, LocalTransport())
    follows = config.data.follow is not None
    try:
        path = folder / STREAM / FIRST / HISTORIES if follows else prepare_data(config)
    except ValueError as error:
        if "no such file" not in str(error):
            raise
        raise ValueError(
            f"{error}; a run needs its data: say where it is, or use an export of the run, which "
            "needs none"
        ) from None
    features, weights = load_features(config, path, folder), dict(read_weights(found))
    described, progress = RunData(config, folder, path, features), found.state["progress"]
    catalogue = described.list_items(weights["table.item"], progress)
    module = build_plain(config, weights, catalogue, features)
    file = open_growing(folder / STREAM / STORE) if follows else described.file
    more = described.vocabulary, file, described.time_unit, found, described
    return Loaded(folder, config, module, catalogue, features, *more)


def _load_export(folder: Path) -> Loaded:
    from safetensors.torch import load_file

    about: dict[str, Any] = json.loads((folder / EXPORT).read_text(encoding="utf-8"))
    config = RunConfig.read(folder)
    features, values = None, [folder / VOCABULARY] if config.data.follow else []
    if (folder / FOLDER / ABOUT).is_file():
        features = FeatureStore(folder / FOLDER, values)
    weights = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    catalogue = Catalogue.read(folder)
    module = build_plain(config, weights, catalogue, features)
    path = folder / VOCABULARY
    vocabulary = path if path.is_file() else None
    unit = about["time_unit"]
    return Loaded(folder, config, module, catalogue, features, vocabulary, None, unit, None)


def build_plain(
    config: RunConfig, weights: Weights, catalogue: Catalogue, features: FeatureStore | None
) -> nn.Module:
    """The model in evaluation mode, on the CPU."""
    if config.model.head == "dlrm":
        raise ValueError(
            "a model with --head dlrm is trained and evaluated, but cannot be loaded yet: "
            "`freescale eval` measures it, freescale.export writes the weights of a checkpoint"
        )
    tables = {
        name.removeprefix("table."): _fill_table(name.removeprefix("table."), tensors, catalogue)
        for name, tensors in weights.items()
        if name.startswith("table.")
    }
    sizes = FeatureTables()
    if features is not None:
        sizes = replace(size_tables(features), vectors=features.load_vectors())
    actions = len(tables["action"]) if "action" in tables else 0
    module: Any = build_module(config, len(tables["item"]), actions, sizes)
    state = {name: value.float() for name, value in weights["dense"].items()}
    state |= {f"{name}.weight": rows for name, rows in tables.items()}
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False).eval()
    if module.item_features is not None:
        assert features is not None
        _fold_features(module, catalogue, features)
    return module  # type: ignore[no-any-return]


def _fill_table(name: str, tensors: dict[str, Tensor], catalogue: Catalogue) -> Tensor:
    """The rows of a table; of a dynamic one those of the catalogue, or up to the highest action,
    and one of all other ids."""
    rows = tensors["weight"].float()
    if "ids" not in tensors:
        return rows
    ids, keys = tensors["ids"].numpy(), catalogue.keys
    if name != "item":
        if ids.min(initial=0) < 0 or ids.max(initial=0) > _MOST_ACTIONS:
            raise ValueError(f"table {name!r} is dynamic, with ids above {_MOST_ACTIONS:,}")
        keys = np.arange(ids.max(initial=-1) + 1)
    assert keys is not None
    others = (
        tensors["default"].float() if "default" in tensors else rows.new_zeros(1, rows.shape[1])
    )
    found = others.repeat(len(keys) + 1, 1)
    found[torch.from_numpy(np.searchsorted(keys, ids))] = rows
    return found


@torch.no_grad()
def _fold_features(module: Any, catalogue: Catalogue, features: FeatureStore) -> None:
    """Makes the features of items a part of their rows."""
    rows = module.item.weight
    numbers = np.arange(len(rows))
    if catalogue.keys is not None:  # no item has the last id
        numbers = np.append(catalogue.keys, np.iinfo(np.int64).min)
    for first in range(0, len(rows), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        wanted = torch.from_numpy(numbers[part])
        codes, own = features.find_items(wanted)
        vectors = features.find_vectors(wanted) if features.vector_widths else None
        rows[part] = module.describe_rows(rows[part], codes, own, vectors)
    module.item_features, module.item_vectors = None, nn.ModuleList()
