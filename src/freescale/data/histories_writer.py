"""Writes histories files (see histories.py) as row groups of bounded size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.histories import KEY, HistoriesMetadata, count_events

GROUP_USERS = 256  # users in a row group, at most
GROUP_EVENTS = 1_000_000  # the user that reaches this ends the row group


class HistoriesWriter:
    """Writes users, in final order and tables of any size, as row groups of bounded size."""

    def __init__(self, path: Path, schema: pa.Schema):
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._rest: list[pa.Table] = []
        self._users = self._events = 0  # in _rest

    def write(self, table: pa.Table) -> None:
        """`table`: user_id and list columns, in the order of the schema."""
        counts = count_events(table.column("item_id"))
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
            self._rest[-1] = self._rest[-1].take(pa.array(np.arange(len(self._rest[-1]))))

    def _flush(self) -> None:
        if self._rest:
            table = pa.concat_tables(self._rest)
            self._writer.write_table(table, row_group_size=table.num_rows)
        self._rest, self._users, self._events = [], 0, 0

    def close(self, metadata: HistoriesMetadata | None) -> None:
        """Writes what is left, and the metadata. None, after a failure, only closes the file."""
        if metadata is not None:
            self._flush()
            self._writer.add_key_value_metadata({KEY.decode(): json.dumps(asdict(metadata))})
        self._writer.close()


def make_schema(columns: Mapping[str, pa.DataType]) -> pa.Schema:
    """Schema of a histories file with these list columns."""
    return pa.schema(
        [("user_id", pa.int64()), *((name, pa.list_(kind)) for name, kind in columns.items())]
    )
