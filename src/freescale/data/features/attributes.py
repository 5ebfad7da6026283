"""Reads a file with a row of attributes per item, in any format that interactions have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from freescale.config.features import Feature
from freescale.data.features.inference import Column, infer_column
from freescale.data.histories import explain_damage
from freescale.data.ingest.column_names import find_roles, refuse_repeated, require_column
from freescale.data.ingest.layouts import Layout, lay_out_columns
from freescale.data.ingest.sources import SourceFile
from freescale.data.ingest.tables import is_parquet, read_tables
from freescale.data.values import BadValue, decode_text


@dataclass(frozen=True)
class AttributeFile:
    """A file of attributes: its columns, and the one with the ids."""

    file: SourceFile
    layout: Layout
    key: str
    role: str  # `item` or `user`

    @property
    def names(self) -> list[str]:
        """All columns but the ids."""
        return [name for name in self.layout.names if name != self.key]

    def open(self, columns: Sequence[str]) -> Callable[[Sequence[str]], dict[str, pa.Array]]:
        """Returns a function that reads some of these columns. Parquet is read at each call, other
        files are parsed now and stay in memory."""
        if self.layout.format == "parquet":
            return self.read
        whole = self.read(columns)
        return lambda names: {name: whole[name] for name in names}

    def read(self, columns: Sequence[str]) -> dict[str, pa.Array]:
        """Columns of the whole file, dictionaries and bytes decoded. Rows keep their order."""
        for name in columns:
            require_column(self.file, name, self.layout.names)
        blocks = list(read_tables(self.file, self.layout, columns))
        if not blocks:
            raise ValueError(
                f"{self.file}: the file has no rows; give one with a row per {self.role}"
            )
        joined = pa.concat_tables([b.table for b in blocks], promote_options="permissive")
        return {name: self._join(name, joined.column(name)) for name in columns}

    def _join(self, name: str, chunks: pa.ChunkedArray) -> pa.Array:
        try:
            return decode_text(chunks.combine_chunks())
        except pa.ArrowInvalid as error:  # Arrow's offsets into text have 32 bits
            raise ValueError(
                f"{self.file}: column {name!r} holds more than 2 GB of text; drop it, or name the "
                "columns to use: --features COLUMN,COLUMN"
            ) from error

    def infer(self, name: str, values: pa.Array) -> Column:
        """Infers the kind of a column. Only items have vectors."""
        column = infer_kind(self.file, self.layout, name, self.role, values)
        lists = ("vector",) if self.role == "user" else ()
        return column.without(lists, "only items have vectors")


def open_attributes(file: SourceFile, role: str, name: str) -> AttributeFile:
    """Finds out how a file of attributes is laid out.

    Args:
        file: of any format.
        role: whose attributes: `item` or `user`.
        name: of the id column in the interactions, which counts first.

    Raises:
        ValueError: the format is unclear, or no column is recognised as the ids.
    """
    layout = lay_out_table(file)
    given = {role: name} if name in layout.names else {}
    key = find_roles(layout.names, given, (role,)).get(role)
    if key is None:
        shown = ", ".join(map(repr, layout.names))[:200]
        raise ValueError(
            f"{file}: no column is recognised as the {role} among {shown}; rename it to {name!r}, "
            "as in the interactions"
        )
    refuse_repeated(file, key, layout.names)
    return AttributeFile(file, layout, key, role)


def infer_kind(
    file: SourceFile, layout: Layout, name: str, source: str, values: pa.Array
) -> Column:
    """Infers the kind of a column, by the header of its file if that declares types."""
    with naming(file, Feature(name, source, None, (name,))):
        return infer_column(name, source, values, layout.declared.get(name))


def lay_out_table(file: SourceFile) -> Layout:
    """Finds the columns of a table of any format. No column has a role."""
    if not is_parquet(file):
        return lay_out_columns(file)
    with explain_damage(file):
        return Layout("parquet", pq.read_schema(file.path).names, {})


@contextmanager
def naming(file: SourceFile, feature: Feature) -> Iterator[None]:
    """Adds file and row to the error of a bad value."""
    try:
        yield
    except BadValue as error:
        where = "" if error.row is None else f", row {error.row + 1}"
        columns = ", ".join(map(repr, feature.columns))
        raise ValueError(f"{file}{where}: column {columns} {error.problem}; {error.fix}") from None
