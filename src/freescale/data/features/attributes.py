"""Reads a file with a row of attributes per item, in any format that interactions have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Columns of the whole file, dictionaries and bytes decoded. Rows keep their order."""
        for name in columns:
            require_column(self.file, name, self.layout.names)
        blocks = list(read_tables(self.file, self.layout, columns))
        if not blocks:
            raise ValueError(
                f"{self.file}: the file has no rows; give one with a row per {self.role}"
            )
        tables = [block.table for block in blocks]
        joined = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
        return pa.table({n: decode_text(_get_only(joined.column(n))) for n in columns})

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


def _get_only(chunks: pa.ChunkedArray) -> pa.Array:
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


@contextmanager
def naming(file: SourceFile, feature: Feature) -> Iterator[None]:
    """Adds file and row to the error of a bad value."""
    try:
        yield
    except BadValue as error:
        where = "" if error.row is None else f", row {error.row + 1}"
        columns = ", ".join(map(repr, feature.columns))
        raise ValueError(f"{file}{where}: column {columns} {error.problem}; {error.fix}") from None
