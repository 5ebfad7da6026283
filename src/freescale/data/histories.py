"""The histories file: Parquet with one row per user, ordered by the time of the user's last event;
or a folder of such files, in any order.

Columns: user_id (int64) and the lists item_id, timestamp, optional action and side columns, each
history in time order. The metadata key `freescale` has, as JSON: version,
num_items, num_users, num_events, dropped_users, columns, fingerprint, no_labels, read, any_ids.
Files made elsewhere need the columns only. docs/guide/warehouse.md has the schema for others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.config import DataConfig
from freescale.data.parquet_parts import ParquetParts
from freescale.data.parquet_ranges import read_footers
from freescale.random import hash_name
from freescale.stores.path import StorePath, as_path

VERSION = 1
VOCABULARY = "vocabulary.parquet"  # the texts of ids, with the histories
KEY = b"freescale"


@dataclass(frozen=True)
class HistoriesMetadata:
    """The metadata of a histories file."""

    num_items: int  # largest id plus 1, or more; with any_ids, number of distinct ids
    num_users: int
    num_events: int
    dropped_users: int
    columns: tuple[str, ...]  # list columns
    fingerprint: str
    version: int = VERSION
    # Columns with values other than 0 and 1: file, name there, value. None: not checked.
    no_labels: Mapping[str, Sequence[str]] | None = None
    read: tuple[str, ...] = ()  # report of how the source was interpreted
    any_ids: bool = False  # items are arbitrary 64-bit ids


@dataclass(frozen=True)
class RowGroup:
    """One decoded row group."""

    offsets: NDArray[Any]  # [users + 1] int64
    values: Mapping[str, NDArray[Any]]  # each [events]


def make_fingerprint(*parts: Any) -> str:
    """A short fingerprint of data that is made of `parts`."""
    return f"{hash_name(json.dumps(parts, default=str)) % (1 << 64):016x}"


def is_histories(path: Path) -> bool:
    """Whether a Parquet file holds histories, by its metadata or its list columns."""
    with explain_damage(path):
        stored = [path] if isinstance(path, StorePath) else []
        footer = read_footers(stored)[0] if stored else pq.read_metadata(path)
    return KEY in (footer.metadata or {}) or any(
        field.name == "item_id" and is_list(field.type) for field in footer.schema.to_arrow_schema()
    )


@contextmanager
def explain_damage(path: object) -> Iterator[None]:
    """Turns pyarrow's error about a Parquet file into one line with the fix."""
    try:
        yield
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0][:200]
        raise ValueError(
            f"{path}: not a readable Parquet file ({reason}); write it again"
        ) from error


class HistoriesFile:
    """Reads a histories file by row group; only the sizes of row groups stay in memory.

    Args:
        path: Of the file, or of a folder with several, which are read in the order of their names.
        num_items: Ids are below it; by default the largest plus 1.
        any_ids: Items are arbitrary 64-bit ids of a dynamic table.

    Raises:
        ValueError: The file is missing, not a histories file, or has ids from `num_items` on.
    """

    def __init__(
        self,
        path: str | Path,
        num_items: int | None = DataConfig.num_items,
        any_ids: bool = False,
    ):
        self.path, self.any_ids = as_path(path), any_ids
        self.file = ParquetParts(_find_parts(self.path))
        self._check_schema()
        rows = [self.file.describe(group).num_rows for group in range(len(self.file))]
        # [groups + 1]: first sample of each
        self.starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        if self.num_samples == 0:
            raise ValueError(
                f"{self.path}: the file has no users (0 rows); give one with at least one"
            )
        single = len(self.file.paths) == 1  # the metadata of a file are about this one
        known: dict[str, Any] = json.loads(self.file.metadata.get(KEY, "{}")) if single else {}
        if known and known["version"] != VERSION:
            raise ValueError(
                f"{self.path}: format version {known['version']}, not {VERSION}; prepare it again"
            )
        # with any_ids, how many different ones there are; 0: not known
        self.num_items: int = self._find_size(known, num_items)
        self.no_labels: Mapping[str, Sequence[str]] | None = known.get("no_labels")
        self.read_as: tuple[str, ...] = tuple(known.get("read", ()))
        self.dropped_users: int = known.get("dropped_users", 0)
        self.fingerprint: str = known.get("fingerprint") or make_fingerprint(
            *((path.name, path.stat().st_size) for path in self.file.paths[1:]),
            *(self.file.paths[0].stat().st_size, rows, self.num_items),
        )

    @property
    def num_samples(self) -> int:
        return int(self.starts[-1])

    @property
    def mean_length(self) -> float:
        """Mean events of a history, from the file's footer."""
        chunks = (self._find_chunk(group, "item_id") for group in range(self.num_groups))
        events: int = sum(chunk.num_values for chunk in chunks)
        return events / self.num_samples

    @property
    def num_groups(self) -> int:
        return len(self.starts) - 1

    def _check_schema(self) -> None:
        schema = self.file.schema
        missing = [n for n in ("user_id", "item_id", "timestamp") if n not in schema.names]
        if missing:
            present = ", ".join(schema.names)
            raise ValueError(
                f"{self.path}: column {missing[0]!r} is missing; the file has {present}; add it"
            )
        self.columns = tuple(
            f.name for f in schema if is_list(f.type) and is_number(f.type.value_type)
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

    def _find_size(self, known: Mapping[str, Any], num_items: int | None) -> int:
        if self.any_ids:
            return known["num_items"] if known.get("any_ids") else 0
        if known.get("any_ids"):
            raise ValueError(
                f"{self.path}: item ids are any numbers of 64 bits, for a dynamic table; train "
                "with --rows item=dynamic:ROWS, or prepare the interactions again"
            )
        largest = known["num_items"] - 1 if known else self.find_largest("item_id")
        if largest < 0:
            raise ValueError(f"{self.path}: no item id of 0 or more; give a file with events")
        if num_items is not None and largest >= num_items:
            raise ValueError(
                f"{self.path}: item id {largest} is not below num_items {num_items}; "
                "raise num_items"
            )
        return num_items or largest + 1

    def find_largest(self, name: str) -> int:
        """Largest value of an integer column, from statistics if present; -1 without any."""
        largest = -1
        for group in range(self.num_groups):
            extremes = self.read_extremes(group, name)
            if extremes is not None:
                largest = max(largest, extremes[1])
            else:
                values = _flatten(self.file.read(group, [name]).column(name))[1]
                largest = max(largest, int(values.max(initial=-1)))
        return largest

    def _find_chunk(self, group: int, name: str) -> pq.ColumnChunkMetaData:
        about = self.file.describe(group)
        for chunk in map(about.column, range(about.num_columns)):
            path = chunk.path_in_schema  # of a list: "category.channel.list.element"
            if name in (path, path.rsplit(".", 2)[0]):
                return chunk
        raise KeyError(name)

    def read_extremes(self, group: int, name: str) -> tuple[int, int] | None:
        """Smallest and largest value of an integer column in a row group, from its statistics."""
        kind = self.file.schema.field(name).type.value_type
        if pa.types.is_floating(kind):
            return None
        chunk = self._find_chunk(group, name)
        if not (chunk.is_stats_set and chunk.statistics.has_min_max):
            return None
        return int(chunk.statistics.min), int(chunk.statistics.max)

    def find_times(self) -> tuple[int, int]:
        """The times of the first and the last event, from statistics if present."""
        first, last = [], []
        for group in range(self.num_groups):
            extremes = self.read_extremes(group, "timestamp")
            if extremes is None:
                times = _flatten(self.file.read(group, ["timestamp"]).column(0))[1]
                extremes = (int(times.min()), int(times.max())) if len(times) else None
            first += [] if extremes is None else [extremes[0]]
            last += [] if extremes is None else [extremes[1]]
        if not first:
            raise ValueError(f"{self.path}: no event in any history; give a file with events")
        return min(first), max(last)

    def find_dtype(self, column: str) -> np.dtype[Any]:
        """The type of the values of a list column."""
        kind: type[Any] = self.file.schema.field(column).type.value_type.to_pandas_dtype()
        return np.dtype(kind)

    def read_users(self, group: int) -> NDArray[np.int64]:
        """[users] ids of the users of a row group."""
        users = self.file.read(group, ["user_id"]).column("user_id")
        return users.to_numpy().astype(np.int64)  # type: ignore[no-any-return]

    def read(self, group: int, columns: tuple[str, ...]) -> RowGroup:
        """Decodes columns of one row group; checks lengths, id range, time order and nulls."""
        table = self.file.read(group, columns)
        offsets: NDArray[Any] | None = None
        values = {}
        for name in columns:
            column = table.column(name)
            if column.null_count or any(chunk.flatten().null_count for chunk in column.chunks):
                raise ValueError(
                    f"{self.file.find_path(group)}: column {name!r} has null (missing) values; "
                    "fill or drop those events"
                )
            ends, values[name] = _flatten(column)
            if offsets is not None and not np.array_equal(offsets, ends):
                row = int(np.flatnonzero(np.diff(offsets) != np.diff(ends))[0])
                raise ValueError(
                    f"{self._name_user(group, row)} has lists of different lengths in {name!r}; "
                    "fix that row"
                )
            offsets = ends
        assert offsets is not None
        self._check_values(group, offsets, values)
        return RowGroup(offsets, values)

    def _check_values(
        self, group: int, offsets: NDArray[Any], values: Mapping[str, NDArray[Any]]
    ) -> None:
        items, times = values.get("item_id"), values.get("timestamp")
        if self.any_ids:
            items = None
        if items is not None and len(items) and (items.min() < 0 or items.max() >= self.num_items):
            at = int(np.flatnonzero((items < 0) | (items >= self.num_items))[0])
            raise ValueError(
                f"{self._name_user(group, _find_row(offsets, at))} has item id {items[at]}, not in "
                f"[0, {self.num_items}); raise num_items or renumber the items"
            )
        if times is not None and len(times) > 1:
            back = np.diff(times) < 0
            # between two users
            back[offsets[1:-1][(offsets[1:-1] > 0) & (offsets[1:-1] < len(times))] - 1] = False
            if back.any():
                at = int(np.flatnonzero(back)[0])
                user = self._name_user(group, _find_row(offsets, at))
                raise ValueError(
                    f"{user} has timestamp {times[at + 1]} after {times[at]}; sort each history by "
                    "time"
                )

    def _name_user(self, group: int, row: int) -> str:
        """File and user, for errors."""
        users = self.file.read(group, ["user_id"]).column("user_id")
        return f"{self.file.find_path(group)}: user {users[row].as_py()}"


def _find_parts(path: Path) -> list[Path]:
    """The files of a path. ValueError if it has none, or another one."""
    if not path.exists():
        raise ValueError(f"{path}: no such file; give a histories file (`prepare` makes one)")
    parts = list_parts(path) if path.is_dir() else [path]
    # in a store, only the first file is read: the others are like it
    for part in parts[:1] if isinstance(path, StorePath) else parts:
        if part.stat().st_size == 0 or not is_histories(part):
            raise ValueError(f"{part}: not a histories file; make one of it with `prepare`")
    if not parts:
        raise ValueError(f"{path}: no Parquet file in the folder; give one with histories")
    return parts


def list_parts(folder: Path) -> list[Path]:
    """The Parquet files below a folder, in the order of their names, without what other programs
    keep there (names that begin with _ or .) and the texts of ids."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in (".parquet", ".pq"))
    return sorted(
        path
        for path in found
        if path.is_file()
        and path.name != VOCABULARY
        and not any(part[0] in "._" for part in path.relative_to(folder).parts)
    )


def _find_row(offsets: NDArray[Any], event: int) -> int:
    return int(np.searchsorted(offsets, event, "right")) - 1


def count_events(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """[rows]: the length of each list of a list column."""
    return np.asarray(pc.list_value_length(column), np.int64)


def _flatten(column: pa.ChunkedArray) -> tuple[NDArray[Any], NDArray[Any]]:
    """A list column -> offsets [rows + 1] and values [events], without a loop over rows."""
    offsets = np.append(0, np.cumsum(count_events(column)))
    # Writable: Arrow's buffers are read-only, and tensors are made of these.
    return offsets, np.require(pc.list_flatten(column).to_numpy(), requirements="W")


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
