"""Reads files of events as tables, block by block, each row with its place in the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.config.columns import ORDER
from freescale.data.histories import explain_damage, is_list, is_number
from freescale.data.ingest import yambda
from freescale.data.ingest.column_names import find_roles, require_roles
from freescale.data.ingest.layouts import LINES, Layout, detect_layout, require_columns
from freescale.data.ingest.sources import SourceFile
from freescale.data.ingest.text_blocks import TextBlock, read_blocks
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
    """Yields the needed columns of a file, in blocks of bounded size. `first_user` is the number of
    the first user, if lines do not name theirs."""
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
    """Further numeric columns of a Parquet file: complete, and by statistics incomplete ones."""
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


def parse_csv(
    block: TextBlock, layout: Layout, columns: Sequence[str], file: SourceFile
) -> pa.Table:
    """Parses the columns as strings; empty values become null."""
    data, separator = block.data, layout.separator
    # Arrow accepts only single characters; files with `::` have no tabs in their values
    if separator == b"::":
        data, separator = data.replace(b"::", b"\t"), b"\t"
    quoted = layout.quoted and b'"' in data
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(data),
            # Arrow's errors name the row only if a single thread parses
            read_options=pa.csv.ReadOptions(column_names=list(layout.names), use_threads=False),
            parse_options=pa.csv.ParseOptions(
                delimiter=separator.decode(),
                quote_char='"' if layout.quoted else False,
                newlines_in_values=quoted,
            ),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(columns, pa.string()),
                include_columns=list(columns),
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowException as error:
        message = str(error).splitlines()[0][:200]
        row = re.search(r"Row #(\d+): ", message)
        where = f", {block.locate(int(row[1]) - 1)}" if row else ""
        reason = message[row.end() :] if row else message
        column = re.search(r"CSV column #(\d+)", message)
        about = f"column {layout.names[int(column[1])]!r}: " if column else ""
        fix = "save the file as UTF-8" if "UTF8" in message else "fix or drop such rows"
        raise ValueError(f"{file}{where}: {about}{reason}; {fix}") from error
    if not layout.padded:
        return table
    return pa.table({name: _strip(table.column(name)) for name in columns})


def _strip(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Strips whitespace; empty strings become null."""
    texts = pc.ascii_trim_whitespace(values)
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)


def parse_json(
    block: TextBlock, layout: Layout, columns: Sequence[str], file: SourceFile
) -> pa.Table:
    """Parses the columns with their JSON types, number or string; missing values become null."""
    types = {name: layout.types.get(name, pa.null()) for name in columns}
    expected = pa.json.ParseOptions(
        explicit_schema=pa.schema(types), unexpected_field_behavior="ignore"
    )
    try:
        table = _read_json(block, expected)
    except pa.ArrowException:
        try:
            # types differ from those of the file's first lines: infer them again
            table = _read_json(block, pa.json.ParseOptions())
        except pa.ArrowException as error:
            raise _explain_json(error, block, file) from error
    for name in columns:
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows, pa.string()))
    return table.select(list(columns))


def _explain_json(error: pa.ArrowException, block: TextBlock, file: SourceFile) -> ValueError:
    """Adds the line and the value to the parser's message."""
    message = str(error).splitlines()[0][:200].removeprefix("JSON parse error: ")
    found = re.search(r" in row (\d+)", message)
    if found is None:
        return ValueError(f"{file}: {message}; fix or drop such rows")
    row, reason = int(found[1]), message[: found.start()].rstrip(".")
    line = [line for line in block.data.split(b"\n") if line.strip()][row]
    changed = re.fullmatch(r"Column\(/([^/]+)\) changed from (.+)", reason)
    if changed is None:
        about = f"not a JSON object ({reason}): {line[:60].decode(errors='replace')!r}"
    else:
        value = json.loads(line).get(changed[1])
        about = f"column {changed[1]!r} holds {value!r}: its type changed from {changed[2]}"
    return ValueError(f"{file}, {block.locate(row)}: {about}; fix or drop such rows")


def _read_json(block: TextBlock, options: pa.json.ParseOptions) -> pa.Table:
    # everything in one block of the parser: no object can straddle two
    reading = pa.json.ReadOptions(block_size=len(block.data) + 1, use_threads=False)
    return pa.json.read_json(
        pa.BufferReader(block.data), read_options=reading, parse_options=options
    )


def parse_lines(block: TextBlock, format: str, first_user: int) -> tuple[pa.Table, int]:
    """Parses lines of ids into columns `user` and `item`, and counts the lines. `format` is `pairs`
    (a user and an item), `sequences` (a user's items, numbered from `first_user` on) or
    `user-sequences` (a user and its items)."""
    lines = [line.strip() for line in block.data.split(b"\n")]
    text = pa.array([line for line in lines if line], pa.binary()).cast(pa.string())
    tokens = pc.split_pattern_regex(text, r"\s+")
    counts: np.ndarray = pc.list_value_length(tokens).to_numpy()
    if format == "pairs":
        if len(wrong := np.flatnonzero(counts != 2)):
            row = int(wrong[0])
            raise BadValue(
                row,
                f"has {counts[row]} values, not a user and an item: {text[row].as_py()[:80]!r}",
                "fix or drop such lines, or see --format",
            )
        table = {"user": pc.list_element(tokens, 0), "item": pc.list_element(tokens, 1)}
        return pa.table(table), len(text)
    items = tokens.flatten()
    if format == "sequences":
        users: pa.Array = pa.array(np.repeat(first_user + np.arange(len(text)), counts))
        return pa.table({"user": users, "item": items}), len(text)
    heads = np.cumsum(counts) - counts  # index of each line's first token
    keep = np.ones(len(items), bool)
    keep[heads] = False
    users = pc.list_element(tokens, 0).take(pa.array(np.repeat(np.arange(len(text)), counts - 1)))
    return pa.table({"user": users, "item": items.filter(pa.array(keep))}), len(text)
