"""Fits features to the training part: which categories exist, where buckets end. Then values become
rows of a table.

All features of a source share one table, each with a range of its rows:

    row 0               nothing: fills the places of multi features with fewer values than others
    categorical, multi  missing, unknown, then the categories of the training part in order of text
    numeric             missing, then the buckets
    vector              no rows: a model reads its numbers
    cross               the hashes
    id                  missing or beyond the table, then the ids from 0 on
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from freescale.config.features import Feature
from freescale.data.feature_values import (
    hash_keys,
    read_key_lists,
    read_keys,
    read_numbers,
    read_vectors,
)

MOST_VALUES = 16  # limit for a multi feature
_MISSING, _UNKNOWN, FIRST_KNOWN = 0, 1, 2  # local rows of categories

Columns = Mapping[str, pa.Array]


@dataclass(frozen=True)
class Fitted:
    """A feature with what the training part says of it."""

    feature: Feature  # the declared feature, with its kind
    first: int  # row in the table of its source
    rows: int
    places: int = 1  # values of one item or event, at most
    categories: tuple[str, ...] = ()  # categories of the training part, in order of text
    edges: tuple[float, ...] = ()  # between the buckets of a number
    width: int = 0  # numbers of a vector

    @cached_property
    def _values(self) -> pa.Array:  # many blocks of rows are encoded
        return pa.array(self.categories, pa.string())

    def encode(self, columns: Columns) -> NDArray[np.int32]:
        """Values of the source -> [n, places] rows of its table."""
        feature = self.feature
        if feature.kind == "multi":
            return self._encode_lists(columns[feature.columns[0]])
        if feature.kind == "numeric":
            local = self._find_buckets(read_numbers(columns[feature.columns[0]]))
        elif feature.kind == "cross":
            keys = [read_keys(columns[name]) for name in feature.columns]
            local = (hash_keys(keys).view(np.uint64) % np.uint64(self.rows)).astype(np.int64)
        elif feature.kind == "id":
            ids = np.nan_to_num(read_numbers(columns[feature.columns[0]]), nan=-1.0)
            local = place_ids(ids.astype(np.int64), self.rows)
        else:
            local = self._find_categories(read_keys(columns[feature.columns[0]]))
        return (local.astype(np.int32) + np.int32(self.first))[:, None]

    def _find_categories(self, keys: pa.Array) -> NDArray[np.int64]:
        known = pc.index_in(keys, self._values)
        local = np.array(pc.fill_null(known, _UNKNOWN - FIRST_KNOWN), np.int64) + FIRST_KNOWN
        local[np.asarray(pc.is_null(keys))] = _MISSING
        return local

    def extend(self, texts: Iterable[str]) -> Fitted:
        """With the categories among `texts` that are new, as long as there are rows for them."""
        known, left = set(self.categories), self.rows - FIRST_KNOWN - len(self.categories)
        if self.feature.kind != "categorical" or not left:
            return self
        new = [text for text in texts if text not in known][:left]
        return replace(self, categories=(*self.categories, *new))

    def find_category(self, value: str) -> int:
        """The row of a category. KeyError if the training part has none like it."""
        place = pc.index(self._values, value).as_py()
        if place < 0:
            raise KeyError(value)
        return int(self.first + FIRST_KNOWN + place)

    def name_categories(self, codes: Iterable[int]) -> list[str]:
        """Rows -> categories; rows of what is missing or unknown have none."""
        first = self.first + FIRST_KNOWN
        return [self.categories[code - first] for code in codes if code >= first]

    def _find_buckets(self, numbers: NDArray[np.float64]) -> NDArray[np.int64]:
        local = 1 + np.searchsorted(np.array(self.edges), numbers, "right")
        local[np.isnan(numbers)] = _MISSING
        return local

    def _encode_lists(self, values: pa.Array) -> NDArray[np.int32]:
        keys, sizes = read_key_lists(values, self.feature.separator)
        found = np.zeros((len(sizes), self.places), np.int32)
        found[sizes == 0, 0] = self.first + _MISSING
        column = np.arange(len(keys)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        kept = column < self.places
        row = np.repeat(np.arange(len(sizes)), sizes)[kept]
        found[row, column[kept]] = self.first + self._find_categories(keys)[kept]
        return found


def place_ids(ids: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Ids [n] -> local rows, from 1 on; ids without a row share row 0."""
    return np.where((ids >= 0) & (ids < rows - 1), ids + 1, _MISSING)


def fit_feature(feature: Feature, columns: Columns, counts: NDArray[np.int64]) -> Fitted:
    """Fits one feature; its first row is 0. `columns`: values [n]; counts [n]: how often each is in
    the training part. BadValue for a value that is not of the kind."""
    name, trained = feature.columns[0], counts > 0
    if feature.kind == "cross":
        return Fitted(feature, 0, feature.rows)
    if feature.kind == "id":
        count = feature.rows or 1 + int(np.nan_to_num(read_numbers(columns[name]), nan=-1).max())
        return Fitted(feature, 0, count + 1)
    if feature.kind == "vector":
        return Fitted(feature, 0, 0, places=0, width=read_vectors(columns[name]).shape[1])
    if feature.kind == "numeric":
        numbers = read_numbers(columns[name])[trained]
        edges = _find_edges(numbers[~np.isnan(numbers)], feature.buckets)
        return Fitted(feature, 0, len(edges) + 2, edges=edges)
    if feature.kind == "multi":
        keys, sizes = read_key_lists(columns[name], feature.separator)
        places = int(np.clip(sizes[trained].max(initial=1), 1, MOST_VALUES))
        categories = _find_categories(keys, np.repeat(counts, sizes), feature.least)
        return Fitted(feature, 0, len(categories) + FIRST_KNOWN, places, categories)
    categories = _find_categories(read_keys(columns[name]), counts, feature.least)
    return Fitted(feature, 0, len(categories) + FIRST_KNOWN, categories=categories)


def _find_categories(keys: pa.Array, counts: NDArray[np.int64], least: int) -> tuple[str, ...]:
    table = count_keys([pa.table({"key": keys, "count": counts})])
    enough = table.filter(pc.greater_equal(table.column("count"), max(least, 1)))
    return tuple(sorted(enough.column("key").to_pylist()))


def count_keys(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables of keys with their counts -> one with the sum of each key that is not missing."""
    table = pa.concat_tables(tables).filter(pc.field("key").is_valid())
    counted = table.group_by("key").aggregate([("count", "sum")])
    return counted.select(["key", "count_sum"]).rename_columns(["key", "count"])


def _find_edges(numbers: NDArray[np.float64], buckets: int) -> tuple[float, ...]:
    """Where buckets begin, except the first: quantiles, or each value if there are few."""
    values = np.unique(numbers)
    if len(values) > buckets:
        shares = np.arange(1, buckets) / buckets
        edges = np.unique(np.quantile(numbers, shares, method="lower"))
        values = np.append(values[:1], edges[edges > values[0]])
    return tuple(values[1:].tolist())


def count_cut(fitted: Fitted, columns: Columns) -> int:
    """Values beyond the places of a multi feature, which are left out."""
    if fitted.feature.kind != "multi":
        return 0
    values = columns[fitted.feature.columns[0]]
    _, sizes = read_key_lists(values, fitted.feature.separator)
    return int(np.maximum(sizes - fitted.places, 0).sum())


def describe_fitted(fitted: Fitted, columns: Mapping[str, pa.Array] | None) -> str:
    """What a feature is and how its values are used, in one line."""
    feature = fitted.feature
    about = {
        "categorical": f"{len(fitted.categories):,} categories of the training part",
        "multi": f"{len(fitted.categories):,} categories, up to {fitted.places} of an item",
        "numeric": f"{len(fitted.edges) + 1} buckets with about equally many training values",
        "cross": f"{fitted.rows:,} rows for all combinations",
        "vector": f"{fitted.width:,} numbers, scaled to length 1",
        "id": f"{fitted.rows - 1:,} rows, one of each id, and one for all others",
    }[feature.kind or ""]
    cut = count_cut(fitted, columns) if columns is not None else 0
    more = f"; {cut:,} values beyond the first {fitted.places} of an item left out" if cut else ""
    return f"feature {feature.label} ({feature.kind}): {about}{more}"


def stack_rows(features: Iterable[Fitted]) -> list[Fitted]:
    """Gives each feature its range of rows, from row 1 on."""
    found, first = [], 1
    for fitted in features:
        found.append(replace(fitted, first=first))
        first += fitted.rows
    return found


def count_rows(features: Sequence[Fitted]) -> int:
    """Rows of a source's table; 0 without features."""
    return features[-1].first + features[-1].rows if features else 0


def encode_all(features: Sequence[Fitted], columns: Columns) -> NDArray[np.int32]:
    """Values of a source -> [n, places] rows of its table; one of nothing if all are vectors."""
    parts = [fitted.encode(columns) for fitted in features if fitted.places]
    if not parts:
        return np.zeros((len(next(iter(columns.values()))), 1), np.int32)
    return np.concatenate(parts, axis=1)


def to_json(features: Iterable[Fitted]) -> list[dict[str, Any]]:
    return [asdict(fitted) for fitted in features]


def from_json(entries: Iterable[Mapping[str, Any]]) -> list[Fitted]:
    found = []
    for entry in entries:
        declared = dict(entry["feature"]) | {"columns": tuple(entry["feature"]["columns"])}
        known = {name: tuple(entry[name]) for name in ("categories", "edges")}
        found.append(Fitted(**dict(entry) | known | {"feature": Feature(**declared)}))
    return found
