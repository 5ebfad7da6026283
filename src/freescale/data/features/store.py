"""The features of a run's items and events, as rows of tables, and their join into batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.config.features import KEPT_SCHEMA, Feature
from freescale.data.batches.specs import Features
from freescale.data.catalogue import select_texts
from freescale.data.feature_values import PART, read_vectors
from freescale.data.features.attributes import AttributeFile, naming
from freescale.data.features.crosses import (
    ITEM_KEYS,
    USER_IDS,
    Requests,
    list_item_columns,
    make_keys,
)
from freescale.data.features.fitting import Columns, Fitted, count_rows, encode_all, from_json
from freescale.data.ingest.ids import VOCABULARY
from freescale.random import derive, uniform

FOLDER = "features"  # in the folder of a run
ABOUT = "features.json"
CODES = "items.npy"  # [items (+ 1 with arbitrary ids), places]
WEIGHTS = "own_weights.npy"  # [items]: of their own rows
IDS = "item_ids.npy"  # [items] sorted, if ids are arbitrary
USERS = "users.npy"  # [samples, places]; of a stream [users (+ 1), places]
USER_KEYS = "user_keys.npy"  # [users] sorted, of a stream: a sample is known by its user
LISTED = "listed.npy"
_DROPPED = 0x1D  # key of the draws that drop ids
Codes = NDArray[np.int32]
Rows = NDArray[np.int64]


def name_vectors(number: int) -> str:
    """The file with the vectors of an item feature, by its number."""
    return f"vectors-{number}.npy"


def encode_parts(fitted: Fitted, columns: Columns) -> Codes:
    """All values of a feature -> [n, places] rows of its table."""
    names = fitted.feature.columns
    count = len(columns[names[0]])
    found = np.empty((count, fitted.places), np.int32)
    for first in range(0, count if fitted.places else 0, PART):
        part = {name: columns[name].slice(first, PART) for name in names}
        found[first : first + PART] = fitted.encode(part)
    return found


def write_codes(path: Path, fitted: Sequence[Fitted], codes: Sequence[Codes], rows: Rows) -> None:
    """Writes [len(rows), places] codes of all features, out of those of each, [n, its places].
    `rows`: which of the n; -1: all values are missing."""
    names = [name for each in fitted for name in each.feature.columns]
    missing = encode_all(fitted, {name: pa.nulls(1) for name in names})
    parts = [each for each in codes if each.shape[1]]

    def make(some: Rows) -> Codes:
        if not parts:  # vectors only
            return missing.repeat(len(some), axis=0)
        block = np.concatenate([each[some] for each in parts], axis=1)
        block[some < 0] = missing
        return block

    _write_rows(path, missing, rows, make)


def write_vectors(
    path: Path, source: AttributeFile, fitted: Fitted, columns: Columns, rows: Rows
) -> None:
    """Writes [len(rows), width] vectors in 16 bits; `rows` as of `write_codes`."""
    with naming(source.file, fitted.feature):
        vectors = read_vectors(columns[fitted.feature.columns[0]])
    if vectors.shape[1] not in (0, fitted.width):
        raise ValueError(
            f"{source.file}: the vectors of column {fitted.feature.name!r} have "
            f"{vectors.shape[1]} numbers, the model was trained with {fitted.width}"
        )
    missing = np.zeros((1, fitted.width), np.float16)

    def make(some: Rows) -> NDArray[np.float16]:
        block = missing.repeat(len(some), axis=0)
        if vectors.shape[1]:  # none if all are missing
            block[some >= 0] = vectors[some[some >= 0]]
        return block

    _write_rows(path, missing, rows, make)


def _write_rows(
    path: Path, like: NDArray[Any], rows: Rows, make: Callable[[Rows], NDArray[Any]]
) -> None:
    """Writes what np.save would, without holding it in memory."""
    about = {"descr": like.dtype.str, "fortran_order": False, "shape": (len(rows), like.shape[1])}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, about)
        for first in range(0, len(rows), PART):
            file.write(make(rows[first : first + PART]).tobytes())


class FeatureStore(Features):
    """Features that `prepare_features` has made; opened by each process that needs them."""

    def __init__(self, folder: Path, values: Sequence[Path] = ()) -> None:
        """`values`: vocabularies of streams, whose categories come after those of the first window,
        one after another; the last one is that of the events."""
        self.folder, self._id_dropout, self._seed, self._values = folder, 0.0, 0, values
        self._mapped: dict[str, NDArray[Any] | None] = {}
        about: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        self.item, self.user = from_json(about["item"]), from_json(about["user"])
        self.event, self.context = from_json(about["event"]), from_json(about["context"])
        self.num_items: int = about["num_items"]  # items without an event included
        self.any_ids: bool = about["any_ids"]  # those of a dynamic table, which have no number
        self.lines: tuple[str, ...] = tuple(about["lines"])
        self.fingerprint: str = about["fingerprint"]
        self._texts: dict[str, list[str]] = about["event_texts"]
        self.hour: int = about.get("hour", 0)  # units of the timestamps in an hour
        self.vocabulary = folder / VOCABULARY if (folder / VOCABULARY).is_file() else None
        self.item_rows, self.event_rows = count_rows(self.item), count_rows(self.event)
        self.context_rows, self.user_rows = count_rows(self.context), count_rows(self.user)
        self.user_places = tuple(fitted.places for fitted in self.user)
        self.item_places = sum(fitted.places for fitted in self.item)
        self.context_places = sum(fitted.places for fitted in self.context)
        stored = (list_stored(each.feature) for each in (*self.event, *self.context))
        self.event_columns = tuple(dict.fromkeys(chain.from_iterable(stored)))
        self.vector_widths = tuple(fitted.width for fitted in self.item if fitted.width)
        self.refresh()

    def refresh(self) -> None:
        """Reads the values that a stream has brought since."""
        for path in self._values if self._texts else ():
            if path.is_file():
                self._adopt(pq.read_table(path))

    def adopt(self, vocabulary: pa.Table) -> FeatureStore:
        """A store that knows the values of events that have come with a stream, by their numbers.
        Those before keep their rows: a category has the first one that is free when it comes."""
        store = object.__new__(FeatureStore)  # files of an export may be gone
        vars(store).update(vars(self))
        store._adopt(vocabulary)
        return store

    def _adopt(self, vocabulary: pa.Table) -> None:
        found = {name: select_texts(vocabulary, f"category.{name}") for name in self._texts}
        self._texts = {n: [] if of is None else of[1].to_pylist() for n, of in found.items()}
        self.event, self.context = (
            [each.extend(self._texts.get(each.feature.columns[0], ())) for each in of]
            for of in (self.event, self.context)
        )
        for name in ("_text_keys", "_event_texts", "_event_codes"):
            vars(self).pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        state = {"folder": self.folder, "dropout": self._id_dropout, "seed": self._seed}
        return state | {"values": self._values}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["folder"], state["values"])  # type: ignore[misc]
        self.drop_ids(state["dropout"], state["seed"])

    def drop_ids(self, share: float, seed: int) -> None:
        """From now on a share of a training batch's items is known by their features alone."""
        self._id_dropout, self._seed = share, seed

    def _map(self, name: str) -> Any:
        """An array of the store, mapped into memory at the first use; None if there is none."""
        if name not in self._mapped:
            path = self.folder / name
            self._mapped[name] = np.load(path, mmap_mode="r") if path.is_file() else None
        return self._mapped[name]

    def find_listed(self) -> NDArray[np.int64]:
        """Ids of the items that have a row in --items, ascending."""
        path = self.folder / (IDS if self.any_ids else LISTED)
        return np.load(path) if path.is_file() else np.zeros(0, np.int64)

    def list_files(self) -> list[Path]:
        """The files that describe items and encode features, without those of the run's users."""
        left = (USERS, USER_IDS, USER_KEYS, VOCABULARY)
        return [path for path in self.folder.iterdir() if path.name not in left]

    def copy_statistics(self, folder: Path, schema: str | None = None) -> None:
        target = folder / FOLDER
        target.mkdir(exist_ok=True)
        for name in (ABOUT, WEIGHTS):
            if (self.folder / name).is_file():
                copyfile(self.folder / name, target / name)
        kept = folder / KEPT_SCHEMA
        if schema is not None and Path(schema).resolve() != kept.resolve():
            copyfile(schema, kept)

    def find_items(self, ids: Tensor, batch: int | None = None) -> tuple[Tensor, Tensor]:
        numbers = ids.numpy()
        places = self._find_places(numbers)
        codes = torch.from_numpy(self._map(CODES)[places].astype(np.int64))
        ones = np.ones(numbers.shape, np.float32)
        weights = self._map(WEIGHTS)
        own = torch.from_numpy(ones if weights is None else np.asarray(weights[places]))
        if batch is not None and self._id_dropout:
            draws = uniform(derive(derive(self._seed, _DROPPED, batch), ids))
            own = own * (draws >= self._id_dropout)
        return codes, own

    def find_codes(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """[n, places]: rows of one feature of items."""
        first = 0
        for fitted in self.item:
            if fitted.feature.name == name:
                codes: NDArray[np.int32] = self._map(CODES)
                return codes[self._find_places(ids), first : first + fitted.places]
            first += fitted.places
        raise KeyError(name)

    def describe_items(self, ids: NDArray[np.int64]) -> list[dict[str, list[str]]]:
        """The categories of items [n], by feature."""
        found: list[dict[str, list[str]]] = [{} for _ in ids]
        for fitted in self.item:
            if fitted.categories:
                name = fitted.feature.name
                for about, codes in zip(found, self.find_codes(name, ids).tolist()):
                    about[name] = fitted.name_categories(codes)
        return found

    def load_vectors(self) -> list[Tensor]:
        numbers = [n for n, fitted in enumerate(self.item) if fitted.width]
        return [torch.from_numpy(np.load(self.folder / name_vectors(n))) for n in numbers]

    def find_vectors(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(self._find_places(ids.numpy()), np.int64))

    def _find_places(self, ids: NDArray[np.int64], keys: str = IDS) -> NDArray[np.int64]:
        known = self._map(keys)
        if known is None:
            return ids
        last = len(known)  # row for those without features
        places = np.searchsorted(known, ids)
        found = known[places.clip(max=max(last - 1, 0))] == ids if last else False
        return np.where(found, places, last)

    # ---- users

    def find_users(self, samples: NDArray[np.int64]) -> Tensor:
        places = self._find_places(samples, USER_KEYS)
        return torch.from_numpy(self._map(USERS)[places].astype(np.int64))

    # ---- events

    def find_events(
        self,
        columns: Mapping[str, NDArray[Any]],
        *,
        context: bool = False,
        samples: NDArray[np.int64] | None = None,
    ) -> Tensor:
        parts: list[NDArray[Any]] = []
        joined = iter(self._join_requests(columns, samples) if context else ())
        for fitted in self.context if context else self.event:
            names = list_stored(fitted.feature)
            if fitted.feature.is_joined:
                parts.append(next(joined))
            elif fitted.feature.kind == "numeric":
                values = {fitted.feature.columns[0]: pa.array(columns[names[0]])}
                parts.append(fitted.encode(values))
            elif fitted.feature.kind == "categorical":
                parts.append(self._event_codes[fitted.feature.label][columns[names[0]]])
            else:
                texts = {
                    column: self._event_texts[column].take(pa.array(columns[name]))
                    for column, name in zip(fitted.feature.columns, names, strict=True)
                }
                parts.append(fitted.encode(texts))
        return torch.from_numpy(np.concatenate(parts, axis=1).astype(np.int64))

    def _join_requests(
        self, columns: Mapping[str, NDArray[Any]], samples: NDArray[np.int64] | None
    ) -> list[NDArray[np.int64]]:
        """Rows [n, 1] of each feature of requests that is made of several sources."""
        joined = [fitted for fitted in self.context if fitted.feature.is_joined]
        if not joined:
            return []
        assert samples is not None
        names, users = list_item_columns(joined), self._map(USER_IDS)
        requests = Requests(
            columns,
            samples if users is None else users[samples],
            self._map(ITEM_KEYS) if names else np.zeros((0, 0), np.int64),
            names,
            self._find_places(columns["item_id"]),
            self._text_keys,
            self.hour,
        )
        return requests.encode(joined)

    @cached_property
    def _text_keys(self) -> dict[str, NDArray[np.int64]]:  # by column; the last one is missing (-1)
        return {name: make_keys(texts) for name, texts in self._event_texts.items()}

    @cached_property
    def _event_texts(self) -> dict[str, pa.Array]:  # by column; the last one is missing (-1)
        return {n: pa.array([*texts, None], pa.string()) for n, texts in self._texts.items()}

    @cached_property
    def _event_codes(self) -> dict[str, NDArray[np.int32]]:
        """Rows of each value of the categorical features, as numbered in the histories file."""
        every = (*self.event, *self.context)
        of_kind = [each for each in every if each.feature.kind == "categorical"]
        return {each.feature.label: encode_all([each], self._event_texts) for each in of_kind}


def list_stored(feature: Feature) -> list[str]:
    """The columns of a histories file that hold the values of an event feature."""
    kind = "number" if feature.kind == "numeric" else "category"
    return [f"{kind}.{column}" for column in feature.stored_columns]
