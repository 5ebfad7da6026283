"""Parquet files that are parts of one table: their row groups, counted through."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.parquet_ranges import Footers, Ranges, StoredFile, find_ranges, read_footers
from freescale.stores.calls import get_pool
from freescale.stores.path import StorePath

_AHEAD = 8  # row groups that a scan requests before it reads them
_MOST = 64  # requested row groups that wait to be read, at most


class ParquetParts:
    """Reads row groups of files with the same columns, in the order of the files. Of files in a
    store, it requests the columns of a row group that are read, and of `read_ahead` before that.

    Raises:
        ValueError: a file has other columns, or other types, than the first one.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        stored = [path for path in self.paths if isinstance(path, StorePath)]
        self._footers: Footers | None = read_footers(stored) if stored else None
        self._sizes = [path.stat().st_size for path in stored]
        self._open()
        footers = [self._describe(part) for part in range(len(self.paths))]
        schemas = [footer.schema.to_arrow_schema() for footer in footers]
        self.schema = schemas[0]
        self._groups = [
            (part, group)
            for part, footer in enumerate(footers)
            for group in range(footer.num_row_groups)
        ]
        for path, schema in zip(self.paths, schemas, strict=True):
            if not schema.equals(self.schema):
                raise ValueError(
                    f"{path}: the columns are {_describe(schema)}, and those of "
                    f"{self.paths[0]} are {_describe(self.schema)}; write all files alike"
                )

    def _open(self) -> None:
        self._coming: dict[tuple[Any, ...], Future[Ranges]] = {}  # by row group and columns
        self._last = -1
        local = self.paths if self._footers is None else []
        self._files = [pq.ParquetFile(path, pre_buffer=False) for path in local]

    def _describe(self, part: int) -> pq.FileMetaData:
        return self._files[part].metadata if self._footers is None else self._footers[part]

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which opens the files itself."""
        return {n: value for n, value in vars(self).items() if n not in ("_files", "_coming")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def is_stored(self) -> bool:
        """Whether the files are in a store, where each request takes a while."""
        return self._footers is not None

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """Of the first file."""
        return self._describe(0).metadata or {}

    @property
    def versions(self) -> list[tuple[str, int, int]]:
        """Name, size and time of each file."""
        found = [(path, path.stat()) for path in self.paths]
        return [(str(path.resolve()), about.st_size, about.st_mtime_ns) for path, about in found]

    def find_path(self, group: int) -> Path:
        return self.paths[self._groups[group][0]]

    def describe(self, group: int) -> pq.RowGroupMetaData:
        part, number = self._groups[group]
        return self._describe(part).row_group(number)

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        part, number = self._groups[group]
        if self._footers is None:
            return self._files[part].read_row_group(number, columns=list(columns))
        if group == self._last + 1:  # a scan
            self.read_ahead(range(group, min(group + _AHEAD, len(self))), columns)
        self._last = group
        path = self.paths[part]
        assert isinstance(path, StorePath)
        coming = self._coming.pop((group, *columns), None)
        ranges = coming.result() if coming else self._fetch(group, columns)
        file = StoredFile(path, ranges, self._sizes[part])
        parquet = pq.ParquetFile(file, metadata=self._footers[part], pre_buffer=False)
        return parquet.read_row_group(number, columns=list(columns))

    def read_ahead(self, groups: Sequence[int], columns: Sequence[str]) -> None:
        """Requests row groups that will be read soon, of files in a store."""
        if self.is_stored:
            for group in groups:
                if (group, *columns) not in self._coming:
                    request = get_pool().submit(self._fetch, group, columns)
                    self._coming[group, *columns] = request
            while len(self._coming) > max(_MOST, 2 * len(groups)):  # a rank may pass some over
                self._coming.pop(next(iter(self._coming)))

    def _fetch(self, group: int, columns: Sequence[str]) -> Ranges:
        path: Any = self.find_path(group)
        ranges = find_ranges(self.describe(group), columns)
        return {begin: path.read_range(begin, end) for begin, end in ranges}


def _describe(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
