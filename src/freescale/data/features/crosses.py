"""Crosses of a request and its candidate: rows by a hash of values from several sources.

Each part of a cross is an int64 key of what is known before the user acts: the number of the user
or the item, the hour of the day, a whole number of a column of --items as it is, and the hash of
the text of any other value. `random.derive` joins the keys, from 0, in the order of the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from freescale.config.features import HOUR, ITEM, PART_OF, USER
from freescale.data.feature_values import MISSING, hash_texts, read_keys
from freescale.data.features.attributes import AttributeFile
from freescale.data.features.fitting import Fitted, place_ids
from freescale.data.histories import HistoriesFile
from freescale.data.ingest.timestamps import guess_unit
from freescale.random import derive_array

Keys = NDArray[np.int64]

USER_IDS, ITEM_KEYS = "user_ids.npy", "item_keys.npy"  # files of a store
_HOUR_S = 3600
_FINER = {"ms": 1000, "us": 1000**2, "ns": 1000**3}  # counts of a unit in a second


def measure_hour(file: HistoriesFile) -> int:
    """Units of timestamps in an hour, by the largest one; unknown ones are seconds."""
    return _HOUR_S * _FINER.get(guess_unit(file.find_largest("timestamp")) or "", 1)


def list_item_columns(features: Sequence[Fitted]) -> list[str]:
    """Columns of --items that crosses of requests read."""
    parts = (part.partition(PART_OF) for each in features for part in each.feature.columns)
    return list(dict.fromkeys(name for source, of, name in parts if of and source == "item"))


def make_keys(values: pa.Array) -> Keys:
    """Values of a column [n] -> their keys."""
    if pa.types.is_integer(values.type):
        return np.array(pc.fill_null(values.cast(pa.int64()), MISSING), np.int64)
    return hash_texts(read_keys(values))


def write_parts(
    folder: Path,
    context: Sequence[Fitted],
    file: HistoriesFile | None,
    attributes: AttributeFile | None,
    rows: Keys,
) -> None:
    """Writes what crosses of requests read of users and items. `context`: all features of requests;
    `file`: None if samples are known by their users; `attributes`: --items; rows [items] of each
    item in them, -1: none."""
    joined = [fitted for fitted in context if fitted.feature.is_joined]
    if not joined:
        return
    if file is not None:
        users = [file.read_users(group) for group in range(file.num_groups)]
        np.save(folder / USER_IDS, np.concatenate(users))
    if names := list_item_columns(joined):
        assert attributes is not None
        columns = attributes.read(names)
        keys = np.stack([make_keys(columns[name]) for name in names], axis=1)
        with_none = np.append(keys, np.full((1, len(names)), MISSING), axis=0)
        np.save(folder / ITEM_KEYS, with_none[rows])


@dataclass(frozen=True)
class Requests:
    """The requests of a batch."""

    columns: Mapping[str, NDArray[Any]]  # columns of the histories [n], also `category.COLUMN`
    users: Keys  # [n] numbers of their users
    items: Keys  # [items, columns of --items]
    item_columns: Sequence[str]  # names of these columns
    places: Keys  # [n] rows of `items`
    texts: Mapping[str, Keys]  # texts of each event column's values; the last is missing (-1)
    hour: int  # units of the timestamps in an hour

    def encode(self, features: Sequence[Fitted]) -> list[Keys]:
        """Rows [n, 1] of each feature. What crosses have in common is hashed once."""
        read = cache(self._read)
        joined: dict[tuple[str, ...], Keys] = {(): np.zeros(len(self.users), np.int64)}
        found = []
        for fitted in features:
            parts = fitted.feature.columns
            if fitted.feature.kind == "id":
                local = place_ids(read(parts[0]), fitted.rows)
            else:
                for end in range(1, len(parts) + 1):
                    if parts[:end] not in joined:
                        before = joined[parts[: end - 1]]
                        joined[parts[:end]] = derive_array(before, read(parts[end - 1]))
                hashes = joined[parts].view(np.uint64)
                local = (hashes % np.uint64(fitted.rows)).view(np.int64)
            found.append((local + fitted.first)[:, None])
        return found

    def _read(self, part: str) -> Keys:
        if part == USER:
            return self.users
        if part == ITEM:
            return self.columns["item_id"]
        if part == HOUR:
            return self.columns["timestamp"] // self.hour % 24
        source, _, name = part.partition(PART_OF)
        if source == "item":
            return np.asarray(self.items[self.places, self.item_columns.index(name)])
        return np.asarray(self.texts[name][self.columns[f"category.{name}"]])
