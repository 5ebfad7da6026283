"""Parquet files that are parts of one table: their row groups, counted through."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


class ParquetParts:
    """Reads row groups of files with the same columns, in the order of the files.

    Raises:
        ValueError: a file has other columns, or other types, than the first one.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._open()
        self.schema = self._files[0].schema_arrow
        self._groups = [
            (part, group)
            for part, file in enumerate(self._files)
            for group in range(file.metadata.num_row_groups)
        ]
        for path, file in zip(self.paths, self._files, strict=True):
            if not file.schema_arrow.equals(self.schema):
                raise ValueError(
                    f"{path}: the columns are {_describe(file.schema_arrow)}, and those of "
                    f"{self.paths[0]} are {_describe(self.schema)}; write all files alike"
                )

    def _open(self) -> None:
        self._files = [pq.ParquetFile(path, pre_buffer=False) for path in self.paths]

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which opens the files itself."""
        return {name: value for name, value in vars(self).items() if name != "_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """Of the first file."""
        return self._files[0].metadata.metadata or {}

    @property
    def versions(self) -> list[tuple[str, int, int]]:
        """Name, size and time of each file."""
        found = [(path, path.stat()) for path in self.paths]
        return [(str(path.resolve()), about.st_size, about.st_mtime_ns) for path, about in found]

    def find_path(self, group: int) -> Path:
        return self.paths[self._groups[group][0]]

    def describe(self, group: int) -> pq.RowGroupMetaData:
        part, number = self._groups[group]
        return self._files[part].metadata.row_group(number)

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        part, number = self._groups[group]
        return self._files[part].read_row_group(number, columns=list(columns))


def _describe(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
