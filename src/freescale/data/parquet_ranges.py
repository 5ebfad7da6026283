"""The bytes of Parquet files in a store: their footers, and the columns of a row group."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.workspace import make_folder
from freescale.folders import find_cache_folder
from freescale.random import hash_name
from freescale.stores.calls import get_pool
from freescale.stores.path import StorePath

Ranges = dict[int, bytes]  # contents of ranges, by their first byte
Footers = list[pq.FileMetaData]

_FOOTER = 1 << 16  # bytes at the end of a file that are requested first
_GAP = 1 << 18  # bytes between two columns that are read with them: less than a request costs


def read_footers(paths: Sequence[StorePath]) -> Footers:
    """Reads the footers of files, all at the same time. They are kept in the user's cache, so that
    one process of a machine requests them."""
    kinds = ("size", "ETag", "LastModified")
    known = [[str(path), *(str(path.ask().get(kind)) for kind in kinds)] for path in paths]
    name = f"{hash_name(json.dumps(known)):016x}"

    def write(folder: Path) -> None:
        for number, footer in enumerate(get_pool().map(_read_footer, paths)):
            footer.write_metadata_file(folder / f"{number}")

    cache = find_cache_folder() / "footers"
    folder = make_folder(cache, name, f"the footers below {paths[0].parent}", write)
    return [pq.read_metadata(folder / f"{number}") for number in range(len(paths))]


def _read_footer(path: StorePath) -> pq.FileMetaData:
    size = path.stat().st_size
    begin = max(0, size - _FOOTER)
    file = StoredFile(path, {begin: path.read_range(begin, size)} if size else {}, size)
    try:
        return pq.read_metadata(file)
    except pa.ArrowException as error:
        raise ValueError(
            f"{path}: not a readable Parquet file ({str(error)[:200]}); write it again"
        ) from error


def find_ranges(about: pq.RowGroupMetaData, columns: Collection[str]) -> list[tuple[int, int]]:
    """[begin, end) of the bytes of these columns of a row group, ascending."""
    chunks = []
    for chunk in map(about.column, range(about.num_columns)):
        if chunk.path_in_schema.partition(".")[0] in columns:
            begin, first = chunk.data_page_offset, chunk.dictionary_page_offset
            begin = min(begin, first) if first else begin
            chunks.append((begin, begin + chunk.total_compressed_size))
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted(chunks):
        if ranges and begin - ranges[-1][1] <= _GAP:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((begin, end))
    return ranges


class StoredFile(io.RawIOBase):
    """A file whose bytes are here already, in these ranges; others are requested."""

    def __init__(self, path: StorePath, ranges: Ranges, size: int) -> None:
        self._path, self._ranges, self._size, self._place = path, ranges, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def read(self, count: int = -1) -> Any:
        begin, end = self._place, self._size if count < 0 else min(self._place + count, self._size)
        self._place = end
        for first, data in self._ranges.items():
            if first <= begin and end <= first + len(data):
                return memoryview(data)[begin - first : end - first]
        return self._path.read_range(begin, end)
