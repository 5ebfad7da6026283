"""Reads the rows of flat tables that count, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from freescale.config.columns import Label, parse_columns, parse_labels
from freescale.data.features.attributes import lay_out_table
from freescale.data.ingest.column_names import find_roles, require_column
from freescale.data.ingest.layouts import Layout
from freescale.data.ingest.sources import SourceFile, find_files
from freescale.data.ingest.tables import TableBlock, is_empty, read_tables
from freescale.data.labels import make_label
from freescale.data.values import decode_text

Source = str | Path | Sequence[str | Path]


class FlatRows:
    """The rows of a source, files or a table in memory, for which `where`, as `day<20`, is true."""

    def __init__(self, source: Source | pa.Table, where: str = "") -> None:
        self._table = source if isinstance(source, pa.Table) else None
        if isinstance(source, pa.Table):
            self.files = [SourceFile(Path(), "the table")]
            self._layouts = [Layout("parquet", source.column_names, {})]
        else:
            self.files = [file for file in find_files(source) if not is_empty(file)]
            self._layouts = [lay_out_table(file) for file in self.files]
        if not self.files:
            raise ValueError(f"{source}: the files have no rows; give one with a row per sample")
        self.names = list(self._layouts[0].names)
        self.where: Label | None = None
        if where:
            try:
                (self.where,) = parse_labels(f"where={where}")
            except ValueError:
                problem = f"where={where!r} is no comparison; write one, as 'day<20'"
                raise ValueError(problem) from None

    def find_roles(self, columns: str) -> dict[str, str]:
        """The columns of user, item and time, if there are any."""
        return find_roles(self.names, parse_columns(columns), ("user", "item", "time"))

    def read(self, columns: Sequence[str]) -> Iterator[TableBlock]:
        """Columns of the rows, dictionaries and bytes decoded."""
        label = self.where
        needed = list(dict.fromkeys([*columns, *([label.column] if label else [])]))
        for file, layout in zip(self.files, self._layouts, strict=True):
            for name in needed:
                require_column(file, name, layout.names)
            whole = [] if self._table is None else [self._table.select(needed)]
            blocks = (TableBlock(file, each, lambda row: f"row {row + 1}", 1.0) for each in whole)
            for block in blocks if whole else read_tables(file, layout, needed):
                if label is not None:
                    chosen = block.convert(label.column, lambda values: make_label(label, values))
                    block = block.filter(np.asarray(chosen) == 1)
                table = pa.table({name: block.convert(name, decode_text) for name in needed})
                yield TableBlock(file, table, block.locate, block.share)
