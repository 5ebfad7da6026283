"""The histories file: Parquet with one row per user, ordered by the time of the user's last event.

Columns: user_id (int64) and the lists item_id, timestamp, optional action and side columns, each
history in time order. Under the key `freescale` the file's metadata says, as JSON: version,
num_items, num_users, num_events, dropped_users, columns, fingerprint, no_labels. Files made
elsewhere need the columns only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.config import DataConfig
from freescale.random import hash_name

VERSION = 1
KEY = b"freescale"
GROUP_USERS = 256  # users in a row group, at most
GROUP_EVENTS = 1_000_000  # a row group ends with the user that reaches this


@dataclass(frozen=True)
class Summary:
    """What the metadata says about a histories file."""

    num_items: int
    num_users: int
    num_events: int
    dropped_users: int
    columns: tuple[str, ...]  # list columns
    fingerprint: str
    version: int = VERSION
    # Columns whose source holds something else than 0 and 1: its file, its name there, the value.
    # None: not looked for.
    no_labels: Mapping[str, Sequence[str]] | None = None


@dataclass(frozen=True)
class Group:
    """One decoded row group."""

    offsets: np.ndarray  # [users + 1] int64
    values: Mapping[str, np.ndarray]  # each [events]


def fingerprint_of(*parts: Any) -> str:
    return f"{hash_name(json.dumps(parts, default=str)) % (1 << 64):016x}"


def is_histories(path: Path) -> bool:
    """Whether a Parquet file has the form of histories, by its metadata or its list columns."""
    try:
        metadata, schema = pq.read_metadata(path), pq.read_schema(path)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path}: not a readable Parquet file ({reason}); write it again"
        ) from error
    return KEY in (metadata.metadata or {}) or (
        "item_id" in schema.names and _is_list(schema.field("item_id").type)
    )


class HistoriesFile:
    """Reads a histories file row group by row group; only the row groups' sizes stay in memory."""

    def __init__(self, path: str | Path, num_items: int | None = DataConfig.num_items):
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(
                f"{self.path}: no such file; give a histories file (`prepare` makes one)"
            )
        if self.path.stat().st_size == 0 or not is_histories(self.path):
            raise ValueError(f"{self.path}: not a histories file; make one of it with `prepare`")
        self.file = pq.ParquetFile(self.path, pre_buffer=False)
        self._check_schema()
        metadata = self.file.metadata
        rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        # [groups + 1]: first sample of each
        self.starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        if self.num_samples == 0:
            raise ValueError(
                f"{self.path}: the file has no users (0 rows); give one with at least one"
            )
        known = json.loads(metadata.metadata[KEY]) if KEY in (metadata.metadata or {}) else None
        if known is not None and known["version"] != VERSION:
            raise ValueError(
                f"{self.path}: format version {known['version']}, not {VERSION}; prepare it again"
            )
        largest = known["num_items"] - 1 if known else self._largest_item()
        if num_items is not None and largest >= num_items:
            raise ValueError(
                f"{self.path}: item id {largest} is not below num_items {num_items}; "
                "raise num_items"
            )
        self.num_items: int = num_items or largest + 1
        self.no_labels: Mapping[str, Sequence[str]] | None = (
            known.get("no_labels") if known else None
        )
        self.fingerprint: str = (
            known["fingerprint"]
            if known
            else fingerprint_of(self.path.stat().st_size, rows, self.num_items)
        )

    @property
    def num_samples(self) -> int:
        return int(self.starts[-1])

    @property
    def num_groups(self) -> int:
        return len(self.starts) - 1

    def _check_schema(self) -> None:
        schema = self.file.schema_arrow
        missing = [n for n in ("user_id", "item_id", "timestamp") if n not in schema.names]
        if missing:
            present = ", ".join(schema.names)
            raise ValueError(
                f"{self.path}: column {missing[0]!r} is missing; the file has {present}; add it"
            )
        self.columns = tuple(
            f.name for f in schema if _is_list(f.type) and _is_number(f.type.value_type)
        )
        whole = [n for n in self.columns if pa.types.is_integer(schema.field(n).type.value_type)]
        for name in ("item_id", "timestamp", *(["action"] if "action" in schema.names else [])):
            if name not in whole:
                raise ValueError(
                    f"{self.path}: column {name!r} holds {schema.field(name).type}; "
                    "make it list<int64>"
                )
        if not pa.types.is_integer(schema.field("user_id").type):
            raise ValueError(
                f"{self.path}: column 'user_id' holds {schema.field('user_id').type}; make it int64"
            )

    def _largest_item(self) -> int:
        largest = self.largest("item_id")
        if largest < 0:
            raise ValueError(f"{self.path}: no item id of 0 or more; give a file with events")
        return largest

    def largest(self, name: str) -> int:
        """Largest value of an integer column, -1 without any: from the row groups' statistics if
        they are there."""
        largest = -1
        for group in range(self.num_groups):
            extremes = self.extremes(group, name)
            if extremes is not None:
                largest = max(largest, extremes[1])
            else:
                values = _flat(self.file.read_row_group(group, [name]).column(name))[1]
                largest = max(largest, int(values.max(initial=-1)))
        return largest

    def extremes(self, group: int, name: str) -> tuple[int, int] | None:
        """Smallest and largest value of an integer column in a row group, if its statistics say
        so."""
        kind = self.file.schema_arrow.field(name).type.value_type
        if pa.types.is_floating(kind):
            return None
        about = self.file.metadata.row_group(group)
        columns = [about.column(c) for c in range(about.num_columns)]
        column = next(c for c in columns if c.path_in_schema.split(".")[0] == name)
        if not (column.is_stats_set and column.statistics.has_min_max):
            return None
        return int(column.statistics.min), int(column.statistics.max)

    def read(self, group: int, columns: tuple[str, ...]) -> Group:
        """Decodes the columns of one row group and checks them: equal lengths, ids in range, time
        order, no nulls."""
        table = self.file.read_row_group(group, columns=list(columns))
        offsets: np.ndarray | None = None
        values = {}
        for name in columns:
            column = table.column(name)
            if column.null_count or any(chunk.flatten().null_count for chunk in column.chunks):
                raise ValueError(
                    f"{self.path}: column {name!r} has null (missing) values; fill "
                    "or drop those events"
                )
            ends, values[name] = _flat(column)
            if offsets is not None and not np.array_equal(offsets, ends):
                user = self._user(group, int(np.flatnonzero(np.diff(offsets) != np.diff(ends))[0]))
                raise ValueError(
                    f"{self.path}: user {user} has lists of different lengths in "
                    f"{name!r}; mend that row"
                )
            offsets = ends
        assert offsets is not None
        self._check_values(group, offsets, values)
        return Group(offsets, values)

    def _check_values(
        self, group: int, offsets: np.ndarray, values: Mapping[str, np.ndarray]
    ) -> None:
        items, times = values.get("item_id"), values.get("timestamp")
        if items is not None and len(items) and (items.min() < 0 or items.max() >= self.num_items):
            at = int(np.flatnonzero((items < 0) | (items >= self.num_items))[0])
            user = self._user(group, int(np.searchsorted(offsets, at, "right")) - 1)
            raise ValueError(
                f"{self.path}: user {user} has item id {items[at]}, not in [0, {self.num_items}); "
                "raise num_items or renumber the items"
            )
        if times is not None and len(times) > 1:
            back = np.diff(times) < 0
            # between two users
            back[offsets[1:-1][(offsets[1:-1] > 0) & (offsets[1:-1] < len(times))] - 1] = False
            if back.any():
                at = int(np.flatnonzero(back)[0])
                user = self._user(group, int(np.searchsorted(offsets, at, "right")) - 1)
                raise ValueError(
                    f"{self.path}: user {user} has timestamp {times[at + 1]} after {times[at]}; "
                    "sort each history by time"
                )

    def _user(self, group: int, row: int) -> int:
        return self.file.read_row_group(group, columns=["user_id"]).column("user_id")[row].as_py()


class HistoriesWriter:
    """Writes users, given in their final order in tables of any size, as row groups of bounded
    size."""

    def __init__(self, path: Path, schema: pa.Schema):
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._rest: list[pa.Table] = []
        self._users = self._events = 0  # in _rest

    def write(self, table: pa.Table) -> None:
        """`table`: user_id and list columns, in the order of the schema."""
        counts = np.concatenate(
            [_counts(chunk) for chunk in table.column("item_id").chunks] or [np.zeros(0, np.int64)]
        )
        ends = np.cumsum(counts)
        start = 0
        while start < len(counts):
            before = int(ends[start - 1]) if start else 0
            # row that reaches the limit
            full = int(np.searchsorted(ends, before + GROUP_EVENTS - self._events)) + 1
            stop = min(full, start + GROUP_USERS - self._users, len(counts))
            self._rest.append(table.slice(start, stop - start))
            self._users += stop - start
            self._events += int(ends[stop - 1]) - before
            if self._users >= GROUP_USERS or self._events >= GROUP_EVENTS:
                self._flush()
            start = stop
        # what waits for the next call is copied out: it must not hold the whole table
        if self._rest and len(counts):
            self._rest[-1] = _compact(self._rest[-1])

    def _flush(self) -> None:
        if self._rest:
            table = pa.concat_tables(self._rest)
            self._writer.write_table(table, row_group_size=table.num_rows)
        self._rest, self._users, self._events = [], 0, 0

    def close(self, summary: Summary | None) -> None:
        """Without a summary: after a failure, only lets go of the file."""
        if summary is not None:
            self._flush()
            self._writer.add_key_value_metadata({KEY.decode(): json.dumps(asdict(summary))})
        self._writer.close()


def describe_schema(columns: Mapping[str, pa.DataType]) -> pa.Schema:
    """Schema of a histories file with these list columns."""
    return pa.schema(
        [("user_id", pa.int64()), *((name, pa.list_(kind)) for name, kind in columns.items())]
    )


def _counts(column: pa.Array) -> np.ndarray:
    return np.diff(column.offsets.to_numpy()).astype(np.int64)


def _compact(table: pa.Table) -> pa.Table:
    return table.take(pa.array(np.arange(table.num_rows)))


def _flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """A list column -> offsets [rows + 1] and values [events], without a loop over rows."""
    counts = [_counts(chunk) for chunk in column.chunks]
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    offsets = np.concatenate(
        [[0], np.cumsum(np.concatenate([*counts, np.zeros(0, np.int64)]), dtype=np.int64)]
    )
    # A copy even of one chunk: Arrow's buffers are read-only, and tensors are made of these.
    return offsets, np.concatenate(values) if values else np.zeros(0, np.int64)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
