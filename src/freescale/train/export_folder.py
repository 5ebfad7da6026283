"""What an export of a run holds besides weights: settings, items, vocabulary, features."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile, rmtree

import numpy as np
from torch import Tensor

from freescale.config import RunConfig
from freescale.config.features import KEPT_SCHEMA
from freescale.data.batches.specs import SplitSpec
from freescale.data.batches.windows import count_numbered_items, count_train_items
from freescale.data.catalogue import Catalogue, number_items, read_texts
from freescale.data.features.store import FOLDER, FeatureStore
from freescale.data.histories import HistoriesFile
from freescale.data.ingest.ids import VOCABULARY
from freescale.train.run_folder import copy_file
from freescale.train.time_order import find_split

EXPORT = "export.json"
_VERSION = 1


def list_items(
    config: RunConfig,
    file: HistoriesFile,
    table: dict[str, Tensor],
    vocabulary: Path | None,
    features: FeatureStore | None,
) -> Catalogue:
    """The items of a run, with this item table as in an export. Reads all its items."""
    split = find_split(config, file.path)
    texts = read_texts(vocabulary, "item_id")
    listed = np.zeros(0, np.int64) if features is None else features.find_listed()
    if file.any_ids:
        # items that have features but no row are known in histories
        keys = np.union1d(table["ids"].numpy(), listed)
        there = np.isin(keys, table["ids"].numpy())
        return Catalogue(
            number_items(texts, there, keys), count_train_items(file, split, keys), keys
        )
    events = np.zeros(len(table["weight"]), np.int64)
    counted = count_numbered_items(file, split)
    events[: len(counted)] = counted
    there = np.zeros(len(events), bool)
    there[np.flatnonzero(count_numbered_items(file, SplitSpec("none")))] = True
    there[listed] = True
    return Catalogue(number_items(texts, there, None), events)


def write_description(
    out: Path,
    run: Path,
    catalogue: Catalogue,
    vocabulary: Path | None,
    features: FeatureStore | None,
) -> Iterator[Path]:
    """Writes everything but weights and `write_about`. Removes what an earlier export left."""
    (out / VOCABULARY).unlink(missing_ok=True)
    rmtree(out / FOLDER, ignore_errors=True)
    if vocabulary is not None:  # maps numbers in tables to texts
        yield copy_file(vocabulary, out / VOCABULARY)
    if features is not None:
        (out / FOLDER).mkdir()
        for path in sorted(features.list_files()):
            yield Path(copyfile(path, out / FOLDER / path.name))
        if (run / KEPT_SCHEMA).is_file():
            yield Path(copyfile(run / KEPT_SCHEMA, out / KEPT_SCHEMA))
    yield catalogue.write(out)
    yield Path(copyfile(run / "config.json", out / "config.json"))


def write_about(out: Path, time_unit: str | None, step: int) -> Path:
    """The last file: without it there is no export."""
    about = {"version": _VERSION, "time_unit": time_unit, "step": step}
    (out / EXPORT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return out / EXPORT
