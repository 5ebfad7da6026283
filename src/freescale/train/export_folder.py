"""What an export of a run holds besides weights: settings, items, vocabulary, features."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import copyfile, rmtree
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torch import Tensor

from freescale.config import RunConfig
from freescale.config.features import KEPT_SCHEMA
from freescale.data.batches.specs import SplitSpec
from freescale.data.batches.windows import count_numbered_items, count_train_items
from freescale.data.catalogue import Catalogue, number_items, select_texts
from freescale.data.features.store import FOLDER, FeatureStore
from freescale.data.ingest.ids import VOCABULARY
from freescale.data.ingest.timestamps import guess_unit
from freescale.data.store.event_store import open_growing
from freescale.data.stream.stream import STORE, read_state
from freescale.train.build import find_run_vocabulary
from freescale.train.time_order import find_split, open_file

EXPORT = "export.json"
_VERSION = 1
_BEFORE = -(1 << 63)  # before all times


class RunData:
    """What an export of a run holds besides weights, as of the progress of a checkpoint. `run`: its
    folder; `histories`: of a run that follows a source, those of its first window."""

    def __init__(
        self, config: RunConfig, run: Path, histories: Path, features: FeatureStore | None
    ) -> None:
        self.config, self.run, self.features = config, run, features
        self.file = open_file(config, histories)
        self.vocabulary = find_run_vocabulary(histories, features)
        self._stream = None
        if config.data.follow is None:
            self.time_unit = guess_unit(self.file.find_largest("timestamp"))
        else:
            self._stream, self.vocabulary = histories.parent.parent, histories.parent / VOCABULARY
            self.time_unit = read_state(self._stream)["unit"]
        self._counts: Counter[int] = Counter()  # a stream's events by item, before `_counted`
        self._counted = _BEFORE

    def read_texts(self, progress: Mapping[str, Any]) -> pa.Table | None:
        """The vocabulary, which grows with a stream; None: ids are integers."""
        if self.vocabulary is None or not self.vocabulary.is_file():
            return None
        texts = pq.read_table(self.vocabulary)
        return texts if self._stream is None else texts.slice(0, sum(progress["stream"]["texts"]))

    def list_items(self, table: Mapping[str, Tensor], progress: Mapping[str, Any]) -> Catalogue:
        """The items, with this item table as in an export. Reads all events, of a stream those that
        came since the last call."""
        texts = self.read_texts(progress)
        named = None if texts is None else select_texts(texts, "item_id")
        listed = np.zeros(0, np.int64) if self.features is None else self.features.find_listed()
        split = find_split(self.config, self.file.path)
        if self.file.any_ids:
            # items that have features but no row are known in histories
            keys = np.union1d(table["ids"].numpy(), listed)
            there = np.isin(keys, table["ids"].numpy())
            if self._stream is None:
                counts = count_train_items(self.file, split, keys)
            else:
                counts = self._count_streamed(keys, progress["stream"]["to"])
            return Catalogue(number_items(named, there, keys), counts, keys)
        events = np.zeros(len(table["weight"]), np.int64)
        counted = count_numbered_items(self.file, split)
        events[: len(counted)] = counted
        there = np.zeros(len(events), bool)
        there[np.flatnonzero(count_numbered_items(self.file, SplitSpec("none")))] = True
        there[listed] = True
        return Catalogue(number_items(named, there, None), events)

    def _count_streamed(self, keys: NDArray[np.int64], end: int) -> NDArray[np.int64]:
        """[n]: events of items [n] before the end of a window."""
        if self._counted > end:  # the counts belong to a later checkpoint
            self._counted, self._counts = _BEFORE, Counter()
        assert self._stream is not None
        store = open_growing(self._stream / STORE)
        for segment, entry in zip(store.segments, store.entries, strict=True):
            if entry["last_time"] >= self._counted:
                times = segment.column("timestamp")
                new = (times >= self._counted) & (times < end)
                self._counts.update(segment.column("item_id")[new].tolist())
        self._counted = end
        return np.array([self._counts[key] for key in keys.tolist()], np.int64)

    def write(self, out: Path, items: Catalogue, progress: Mapping[str, Any]) -> Iterator[Path]:
        """Writes all but `write_about`. Removes what an earlier export left."""
        (out / VOCABULARY).unlink(missing_ok=True)
        rmtree(out / FOLDER, ignore_errors=True)
        if (texts := self.read_texts(progress)) is not None:  # maps numbers in tables to texts
            pq.write_table(texts, out / VOCABULARY)
            yield out / VOCABULARY
        copied = {self.run / "config.json": out / "config.json"}
        if self.features is not None:
            (out / FOLDER).mkdir()
            listed = sorted(self.features.list_files())
            copied |= {path: out / FOLDER / path.name for path in listed}
            if (self.run / KEPT_SCHEMA).is_file():
                copied[self.run / KEPT_SCHEMA] = out / KEPT_SCHEMA
        yield from (Path(copyfile(*pair)) for pair in copied.items())
        yield items.write(out)


def write_about(out: Path, time_unit: str | None, step: int) -> Path:
    """The last file: without it there is no export."""
    about = {"version": _VERSION, "time_unit": time_unit, "step": step}
    (out / EXPORT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return out / EXPORT
