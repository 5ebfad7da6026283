"""Reads a file of events as columns of numbers, the same for every file of a stream.

Users, items, actions and categories have ids of 64 bits: a number is its own id, a text is hashed.
So ids need no table of numbers that grows, and a file means the same whenever it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freescale.config.columns import parse_labels
from freescale.config.data import DataConfig
from freescale.data.ingest.hashed_ids import hash_ids
from freescale.data.ingest.ids import ReadDifferently
from freescale.data.ingest.interactions import IDS, Interactions, NoEvents
from freescale.data.ingest.sources import SourceFile
from freescale.data.ingest.timestamps import TimestampFormat

EVENT_ID = "event_id"  # a column, if events have ids of their own
MISSING = np.iinfo(np.int64).min  # id of a category that is missing
_UNITS = ("s", "ms", "us", "ns")

Columns = dict[str, NDArray[Any]]
Texts = dict[str, dict[int, str]]  # column -> id -> what was hashed to it


@dataclass(frozen=True)
class Events:
    """Events in the order of their file, each column [events]."""

    columns: Columns
    texts: Texts

    def __len__(self) -> int:
        return len(self.columns["timestamp"])


class Parser:
    """Reads files. The first one decides the unit of time and the columns; later ones must fit.

    Attributes:
        unit: of time; None: unknown. Dates and fractions are microseconds.
        columns: names, None before the first file.
    """

    def __init__(
        self, data: DataConfig, labels: str, features: Mapping[str, int], context: Collection[str]
    ) -> None:
        """`labels`: columns of labels. `features`: of events, as `Interactions` names them, each
        with the rows for values after the first window. `context`: columns that describe
        requests."""
        self._data, self._labels, self.features, self._context = data, labels, features, context
        self._names = [label.name for label in parse_labels(labels)]
        self._extra = [*features, *([f"id.{data.event_id}"] if data.event_id else [])]
        self.unit: str | None = None
        self.columns: list[str] | None = None

    def parse(self, file: SourceFile) -> Events | None:
        """None: the file has no events. ValueError names what is wrong in it."""
        data = self._data
        try:
            reader = Interactions(
                [file], data.format, data.columns, self._labels, data.missing,
                any_ids=True, vocabulary=data.vocabulary, events=self._extra, hash_all=True,
            )  # fmt: skip
            batches = _read(reader)
        except NoEvents:
            return None
        if known := reader.layouts[0].outcomes & set(self._context):
            raise ValueError(f"{file}: {min(known)!r} is known only after a request; leave it out")
        table = pa.Table.from_batches(batches)
        times = reader.times.get(file)
        if times is None:
            raise ValueError(f"{file}: events without times have no window: name a column of time")
        columns = {name: table.column(name).to_numpy() for name in (*IDS, "timestamp")}
        columns["timestamp"] = self._convert(times, columns["timestamp"])
        kept = {"action"} & set(table.column_names) | set(self._names) | set(self._extra)
        for name in sorted(kept):
            if name not in table.column_names:
                raise ValueError(f"{file}: column {name!r} is missing; every file needs it")
            values = table.column(name).to_numpy()
            columns[name] = values.astype(np.float32) if name in self._names else values
        texts = {name: _collect(reader.hashers[name].texts) for name in ("item_id", "action")}
        for name in self.features:
            if name.startswith("category."):
                numbers = reader.vocabulary.columns.get(name, {})
                ids = hash_ids(numbers).numpy()
                columns[name] = np.append(ids, MISSING)[columns[name]]  # -1: missing
                texts[name] = dict(zip(ids.tolist(), numbers))
        if data.event_id:
            columns[EVENT_ID] = columns.pop(f"id.{data.event_id}")
        self._check(file, columns)
        return Events(columns, {name: found for name, found in texts.items() if found})

    def _convert(self, times: TimestampFormat, values: NDArray[Any]) -> NDArray[np.int64]:
        unit = times.unit if times.kind == "integers" else "us"
        if self.columns is None:
            self.unit = unit
        if self.unit == times.unit:
            return values
        if times.unit is None or self.unit is None:
            raise ValueError(
                f"{times.path}: column {times.column!r} holds {times.meaning}, and earlier events "
                f"have times in {self.unit or 'an unknown unit'}: give all in one unit"
            )
        steps = _UNITS.index(self.unit) - _UNITS.index(times.unit)
        if steps < 0 and times.kind == "integers":
            raise ValueError(
                f"{times.path}: column {times.column!r} holds times in {times.unit}, finer than "
                f"{self.unit}, which earlier events have: give all in one unit"
            )
        return np.asarray(values * 1000**steps if steps > 0 else values // 1000**-steps)

    def _check(self, file: SourceFile, columns: Columns) -> None:
        """Raises ValueError for other columns than before, and for labels that are none."""
        if self.columns is None:
            self.columns = list(columns)
        if self.columns != list(columns):
            raise ValueError(
                f"{file}: columns {', '.join(columns)} differ from those of earlier events: "
                f"{', '.join(self.columns)}"
            )
        for name in self._names:
            wrong = (columns[name] != 0) & (columns[name] != 1)
            if wrong.any():
                value = columns[name][wrong][0]
                raise ValueError(f"{file}: label {name!r} holds {value:g}, not 0 or 1")


def _read(reader: Interactions) -> list[pa.RecordBatch]:
    while True:
        try:
            return list(reader)
        except ReadDifferently as found:
            reader.restart(found.reading)


def _collect(parts: Sequence[tuple[pa.Array, pa.Array]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for ids, texts in parts:
        found |= zip(ids.to_pylist(), texts.to_pylist(), strict=True)
    return found
