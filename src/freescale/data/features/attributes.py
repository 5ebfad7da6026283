"""Reads a file with a row of attributes per item, in any format that interactions have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.config.features import Feature
from freescale.data.features.inference import Column, infer_column
from freescale.data.histories import HistoriesFile, explain_damage
from freescale.data.ingest.column_names import find_roles, refuse_repeated, require_column
from freescale.data.ingest.hashed_ids import HashedIds
from freescale.data.ingest.ids import NotIntegers, find_vocabulary, is_huge, parse_integers
from freescale.data.ingest.layouts import Layout, lay_out_columns
from freescale.data.ingest.sources import SourceFile
from freescale.data.ingest.tables import TableBlock, is_parquet, read_tables
from freescale.data.values import BadValue, cast_values, decode_text, is_text

Ids = NDArray[np.int64]
_SAMPLED = 1 << 20  # rows


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
        """A function that reads some of these columns: Parquet at each call, others from memory."""
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
    """How a file of attributes of `role` (item or user) is laid out; its ids are in column `name`,
    if there. ValueError if the format is unclear, or no column is recognised as the ids."""
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


def read_sample(blocks: Iterable[TableBlock], names: Sequence[str]) -> dict[str, pa.Array]:
    """The first million rows of columns, by which kinds are inferred."""
    tables: list[pa.Table] = []
    for block in blocks:
        tables.append(block.table)
        if sum(map(len, tables)) >= _SAMPLED:
            break
    joined = pa.concat_tables(tables, promote_options="permissive").slice(0, _SAMPLED)
    return {name: decode_text(joined.column(name).combine_chunks()) for name in names}


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


def number_items(
    source: AttributeFile, values: pa.Array, file: HistoriesFile
) -> tuple[Ids, int, pa.Table | None]:
    """Numbers the items of a file of attributes, new ones after those of the histories. Returns [n]
    ids; how many items there are in all; the vocabulary of all, if ids are coded."""
    if file.any_ids:
        return np.array(HashedIds(keep=False).encode(values), np.int64), file.num_items, None
    known = read_texts(file.path, "item_id")
    if not len(known):
        ids = _parse_ids(source, values)
        largest = int(ids.max(initial=-1))
        if is_huge(largest, file.num_items + len(ids)):
            raise ValueError(
                f"{source.file}: item id {largest} of column {source.key!r} needs a table of as "
                f"many rows; use ids below {10 * len(ids):,}, or text"
            )
        return ids, max(file.num_items, largest + 1), None
    texts = _spell(values)
    new = pc.unique(texts.filter(pc.is_null(pc.index_in(texts, known))))
    every = pa.concat_arrays([known, new])
    numbers = pa.array(np.arange(len(known), len(every)))
    vocabulary = pq.read_table(find_vocabulary(file.path))
    further = pa.table([pa.repeat("item_id", len(new)), numbers, new], schema=vocabulary.schema)
    ids = np.array(pc.index_in(texts, every), np.int64)
    return ids, max(file.num_items, len(every)), pa.concat_tables([vocabulary, further])


def number_users(source: AttributeFile, values: pa.Array, file: HistoriesFile) -> Ids:
    """[n] the ids of users as in the histories, -1 for those that these do not have."""
    known = read_texts(file.path, "user_id")
    if not len(known):
        return _parse_ids(source, values)
    return np.array(pc.fill_null(pc.index_in(_spell(values), known), -1), np.int64)


def read_texts(histories: Path, column: str) -> pa.Array:
    """The texts of a coded column, in the order of their numbers; none if it is not coded."""
    path = find_vocabulary(histories)
    if path is None:
        return pa.array([], pa.string())
    mine = pq.read_table(path, filters=pc.field("column") == column)
    return mine.sort_by("id").column("text").combine_chunks()


def _spell(values: pa.Array) -> pa.Array:
    return values if is_text(values.type) else cast_values(values, pa.string(), "ids")


def _parse_ids(source: AttributeFile, values: pa.Array) -> Ids:
    """Ids of data whose ids are integers."""
    try:
        return np.array(parse_integers(values), np.int64)
    except (NotIntegers, BadValue) as error:
        raise ValueError(
            f"{source.file}: column {source.key!r} holds {error}, and the {source.role} ids of the "
            "interactions are integers; use the same ids in both"
        ) from None


def refuse_repeated_ids(source: AttributeFile, values: Sequence[pa.Scalar], ids: Ids) -> None:
    """ValueError if an id [n], other than -1, occurs twice; `values` as the file has them."""
    rows = np.flatnonzero(ids != -1)
    ordered = rows[np.argsort(ids[rows], kind="stable")]
    again = np.flatnonzero(np.diff(ids[ordered]) == 0)
    if len(again):
        first, second = sorted((int(ordered[again[0]]), int(ordered[again[0] + 1])))
        raise ValueError(
            f"{source.file}, rows {first + 1} and {second + 1}: column {source.key!r} holds "
            f"{values[second].as_py()!r} twice ({len(again):,} such rows); keep one row per "
            f"{source.role}"
        )
