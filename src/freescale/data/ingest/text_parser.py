"""Parses blocks of text into tables: CSV, JSON lines, and lines of ids."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from freescale.data.ingest.layouts import Layout
from freescale.data.ingest.sources import SourceFile
from freescale.data.ingest.text_blocks import TextBlock
from freescale.data.values import BadValue


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
    """Parses lines of ids separated by whitespace into columns `user` and `item`. Also returns the
    number of lines.

    `format` is `pairs` (a user and an item), `sequences` (a user's items) or `user-sequences` (a
    user and its items). The lines of `sequences` name no user: they are numbered from `first_user`.
    """
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
