"""Reads files of events as tables, block by block, each row with its place in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.config.columns import ORDER
from freescale.data.histories import explain_damage, is_list, is_number
from freescale.data.ingest import yambda
from freescale.data.ingest.column_names import find_roles, require_roles
from freescale.data.ingest.layouts import LINES, Layout, detect_layout, require_columns
from freescale.data.ingest.sources import SourceFile
from freescale.data.ingest.text_blocks import TextBlock, read_blocks
from freescale.data.ingest.text_parser import parse_csv, parse_json, parse_lines
from freescale.data.values import BadValue

_ROWS = 1 << 18  # rows of Parquet
# names of our Parquet files
_OWN = {"user": "user_id", "item": "item_id", "time": "timestamp", "action": "action"}

T = TypeVar("T")


@dataclass(frozen=True)
class TableBlock:
    """Some rows of a file."""

    file: SourceFile
    table: pa.Table
    locate: Callable[[int], str]  # row -> "line 7"
    share: float  # share of the file read so far

    def convert(self, column: str, function: Callable[[pa.Array], T]) -> T:
        """Applies a function to a column. The error for a bad value says where it is."""
        try:
            return function(self.get_values(column))
        except BadValue as error:
            where = "" if error.row is None else f", {self.locate(error.row)}"
            raise ValueError(
                f"{self.file}{where}: column {column!r} {error.problem}; {error.fix}"
            ) from error

    def get_values(self, column: str) -> pa.Array:
        chunks = self.table.column(column)
        return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()

    def drop_rows(self, columns: Sequence[str]) -> TableBlock:
        """The rows with a value in all of the columns."""
        keep = np.ones(self.table.num_rows, bool)
        for name in columns:
            keep &= self.table.column(name).is_valid().to_numpy()
        return self.filter(keep)

    def filter(self, keep: NDArray[np.bool_]) -> TableBlock:
        """The rows [n] to keep, with their places."""
        if keep.all():
            return self
        rows = np.flatnonzero(keep)
        table = self.table.filter(pa.array(keep))
        return TableBlock(self.file, table, lambda row: self.locate(int(rows[row])), self.share)


def lay_out(file: SourceFile, format: str, given: Mapping[str, str]) -> Layout:
    """Detects how a file of any format is laid out."""
    if format in ("parquet", "yambda") or (format == "auto" and is_parquet(file)):
        return _lay_out_parquet(file, format, given)
    return detect_layout(file, format, given)


def is_parquet(file: SourceFile) -> bool:
    """By its name or its first bytes."""
    return file.is_parquet or _starts_like_parquet(file)


def read_tables(
    file: SourceFile, layout: Layout, columns: Sequence[str], first_user: int = 0
) -> Iterator[TableBlock]:
    """Yields the needed columns of a file, in blocks of bounded size.

    `first_user` is the number of the first user, if lines do not name theirs.
    """
    if layout.is_parquet:
        yield from _read_parquet(file, columns)
        return
    for index, block in enumerate(read_blocks(file, layout.quoted and not layout.is_json)):
        if index == 0 and layout.header:
            block = _skip_header(block)
        if not block.data.strip():
            continue
        if layout.format in LINES:
            try:
                table, lines = parse_lines(block, layout.format, first_user)
            except BadValue as error:
                where = block.locate(error.row or 0)
                raise ValueError(f"{file}, {where}: {error.problem}; {error.fix}") from error
            first_user += lines
        else:
            parse = parse_json if layout.is_json else parse_csv
            table = parse(block, layout, columns, file)
        yield TableBlock(file, table, block.locate, block.share)


def _skip_header(block: TextBlock) -> TextBlock:
    while block.data and not block.data.partition(b"\n")[0].strip():
        block = block.skip_line()
    return block.skip_line()


def _starts_like_parquet(file: SourceFile) -> bool:
    if file.member is not None:
        return False
    with open(file.path, "rb") as raw:
        return raw.read(4) == b"PAR1"


def is_empty(file: SourceFile) -> bool:
    """Whether the file has no bytes or, as Parquet, no rows."""
    if not file.size or not file.is_parquet:
        return not file.size
    with _open_parquet(file) as opened:
        return bool(opened.metadata.num_rows == 0)


def _open_parquet(file: SourceFile) -> pq.ParquetFile:
    with explain_damage(file):
        # not a whole column chunk at once
        return pq.ParquetFile(file.path, pre_buffer=False, buffer_size=1 << 20)


def _lay_out_parquet(file: SourceFile, format: str, given: Mapping[str, str]) -> Layout:
    with _open_parquet(file) as opened:
        schema = opened.schema_arrow
    names, published = schema.names, (*yambda.ROLES.values(), *yambda.READ)
    if format == "yambda":
        require_columns(file, published, names)
    if format == "yambda" or (format == "auto" and not given and set(published) <= set(names)):
        return Layout("yambda", names, yambda.ROLES, feedback=yambda.READ)
    known = {role: name for role, name in _OWN.items() if name in names} | dict(given)
    # other actions and ratings are side columns
    further = [role for role in ("action", "rating") if role in known]
    roles = find_roles(names, known, ("user", "item", "time", *further))
    require_roles(file, names, given, roles)
    if roles["time"] == ORDER:
        del roles["time"]
    for role, name in roles.items():
        if is_list(schema.field(name).type):
            raise ValueError(
                f"{file}: column {name!r}, the {role}, holds {schema.field(name).type}; give a "
                "histories file alone, with the columns user_id, item_id and timestamp"
            )
    return Layout("parquet", names, roles)


def list_side_columns(file: SourceFile, layout: Layout) -> tuple[list[str], list[str]]:
    """Further numeric columns of a Parquet file: complete ones, and by statistics incomplete
    ones."""
    used = {*layout.roles.values(), *_OWN.values()}
    with _open_parquet(file) as opened:
        schema, metadata = opened.schema_arrow, opened.metadata
        repeated = {name for name in schema.names if schema.names.count(name) > 1}
        used |= repeated
        numeric = [f.name for f in schema if f.name not in used and is_number(f.type)]
        missing = set()
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                if column.is_stats_set and column.statistics.null_count:
                    missing.add(column.path_in_schema)
    return [n for n in numeric if n not in missing], [n for n in numeric if n in missing]


def _read_parquet(file: SourceFile, columns: Sequence[str]) -> Iterator[TableBlock]:
    with _open_parquet(file) as opened:
        rows, total = 0, opened.metadata.num_rows
        batches = opened.iter_batches(_ROWS, columns=list(columns))
        while (batch := _read_batch(file, batches, rows)) is not None:
            first, rows = rows, rows + batch.num_rows
            table = pa.Table.from_batches([batch])
            yield TableBlock(file, table, partial(_name_row, first), rows / total)


def _read_batch(
    file: SourceFile, batches: Iterator[pa.RecordBatch], rows: int
) -> pa.RecordBatch | None:
    try:
        return next(batches, None)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ValueError(
            f"{file}, after row {rows}: a damaged Parquet file ({reason}); write it again"
        ) from error


def _name_row(first: int, row: int) -> str:
    return f"row {first + row + 1}"
