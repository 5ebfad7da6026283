"""Reads interaction files (one event per row) as a stream of record batches with the same columns
for every format.

| format    | files                                                     | action                  |
|-----------|-----------------------------------------------------------|-------------------------|
| parquet   | user_id, item_id, timestamp, further numeric columns      | column `action`, if any |
| movielens | ratings.dat (`::`), u.data (tabs), ratings.csv            | round(2 * rating)       |
| amazon    | ratings csv with or without header, reviews as json lines | round(2 * rating)       |
| kuairand  | log csv; 0/1 feedback columns are kept as side columns    | feedback as bits        |

Timestamps keep the unit of the file (KuaiRand and the newer Amazon files count milliseconds):
rounding to seconds would lose the order of events. Several files are brought to the finest unit
among them. Memory is one block of the file; the ids of Amazon files are strings, and their codes
(dense, in order of first appearance) need memory for the catalogue and the users.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from freescale.config import DataConfig
from freescale.data.histories import is_list, is_number
from freescale.data.labels import find_non_label
from freescale.data.text_formats import (
    FEEDBACK,
    FORMATS,
    TextLayout,
    detect_format,
    detect_layout,
    parse_block,
    read_blocks,
    require_columns,
    shorten_error,
)
from freescale.data.timestamps import TimestampFormat, choose_unit

IDS = ("user_id", "item_id")
REQUIRED = (*IDS, "timestamp")
_ROWS = 1 << 18  # rows of Parquet


class Interactions(Iterator[pa.RecordBatch]):
    """The record batches of one or several files. `vocabulary`, `fraction` and `no_labels` grow
    while it is read."""

    def __init__(self, paths: Sequence[Path], format: str):
        if format not in ("auto", *FORMATS):
            raise ValueError(f"unknown format {format!r}: choose auto, {', '.join(FORMATS)}")
        if not paths:
            raise ValueError("no interaction file given: name at least one")
        self.paths = list(paths)
        for path in self.paths:
            if not path.is_file():
                raise ValueError(f"{path}: no such file; give the path of an interaction file")
            if path.stat().st_size == 0:
                raise ValueError(f"{path}: the file is empty (0 bytes); give a file with events")
        self.formats = [detect_format(path) if format == "auto" else format for path in self.paths]
        self.vocabulary: dict[str, dict[str, int]] = {}  # column -> string id -> code
        # column -> file, column there, value that is not 0 or 1
        self.no_labels: dict[str, tuple[str, str, str]] = {}
        self.fraction = 0.0  # of the bytes or rows read so far
        self._done, self._total = 0, sum(path.stat().st_size for path in self.paths)
        self._unit: str | None = None  # of the timestamps, where files are brought to one
        self._batches = self._read()

    def __next__(self) -> pa.RecordBatch:
        return next(self._batches)

    def _read(self) -> Iterator[pa.RecordBatch]:
        schema: pa.Schema | None = None
        self._unit = self._choose_unit()
        for path, format in zip(self.paths, self.formats, strict=True):
            events = 0
            for batch in (
                self._read_parquet(path)
                if format == "parquet"
                else self._read_text(path, detect_layout(path, format))
            ):
                if schema is not None and batch.schema != schema:
                    raise ValueError(
                        f"{path}: columns {_describe_schema(batch.schema)} differ from those of "
                        f"{self.paths[0]}: "
                        f"{_describe_schema(schema)}; give files of one kind"
                    )
                schema = batch.schema
                _check_batch(batch, path)
                self._note_labels(batch, path, format)
                events += batch.num_rows
                if batch.num_rows:
                    yield batch
            if not events:
                raise ValueError(
                    f"{path}: the file has no events (0 rows); give a file with events"
                )
            self._done += path.stat().st_size
        self.fraction = 1.0

    def _choose_unit(self) -> str | None:
        """The common unit of several files; a single file keeps its own. Files that cannot be read
        here are refused when they are read."""
        if len(self.paths) == 1:
            return None
        files: list[TimestampFormat] = []
        for path, format in zip(self.paths, self.formats, strict=True):
            if format != "parquet":
                files.append(_describe_timestamps(path, detect_layout(path, format)))
                continue
            try:
                kind = pq.read_schema(path).field("timestamp").type
            except (pa.ArrowException, KeyError):
                continue
            if pa.types.is_integer(kind) or pa.types.is_timestamp(kind):
                files.append(TimestampFormat.from_type(path, "timestamp", kind))
        return choose_unit(files)

    def _note_labels(self, batch: pa.RecordBatch, path: Path, format: str) -> None:
        for name in batch.schema.names:
            value = (
                None
                if name in REQUIRED or name in self.no_labels
                else find_non_label(batch.column(name).to_numpy())
            )
            if value is not None:
                made = name == "action" and format != "parquet"
                source = (detect_layout(path, format).rating or "feedback") if made else name
                column = f"'action' (made of {source!r})" if made else repr(name)
                self.no_labels[name] = str(path.absolute()), column, value

    def _advance(self, share: float, path: Path) -> None:
        self.fraction = min((self._done + share * path.stat().st_size) / self._total, 1.0)

    def _read_parquet(self, path: Path) -> Iterator[pa.RecordBatch]:
        try:
            # not a whole column chunk at once
            file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        except pa.ArrowException as error:
            raise ValueError(
                f"{path}: not a readable Parquet file ({shorten_error(error)}); write it again"
            ) from error
        with file:
            schema = file.schema_arrow
            require_columns(path, REQUIRED, schema.names)
            for name in REQUIRED:
                kind = schema.field(name).type
                whole = pa.types.is_integer(kind) or (
                    name == "timestamp" and pa.types.is_timestamp(kind)
                )
                if not whole:
                    hint = (
                        "give `prepare` or `Histories` this file"
                        if is_list(kind)
                        else "cast it to int64"
                    )
                    raise ValueError(f"{path}: column {name!r} holds {kind}, not integers; {hint}")
            sides = [
                f.name
                for f in schema
                if f.name not in REQUIRED and is_number(f.type) and f.name != "action"
            ]
            actions = ["action"] if "action" in schema.names else []
            if actions and not pa.types.is_integer(schema.field("action").type):
                raise ValueError(
                    f"{path}: column 'action' holds {schema.field('action').type}; cast it to int64"
                )
            columns, rows = [*REQUIRED, *actions, *sides], 0
            times = TimestampFormat.from_type(path, "timestamp", schema.field("timestamp").type)
            for batch in file.iter_batches(_ROWS, columns=columns):
                rows += batch.num_rows
                self._advance(rows / file.metadata.num_rows, path)
                arrays = [_cast_to_int(batch.column(n), n, path) for n in IDS]
                arrays += [times.convert(batch.column("timestamp"), self._unit)]
                arrays += [_cast_to_int(batch.column(n), n, path) for n in actions]
                flags = [batch.column(n) for n in sides]
                arrays += [a.cast(pa.int8()) if pa.types.is_boolean(a.type) else a for a in flags]
                yield pa.RecordBatch.from_arrays(arrays, names=columns)

    def _read_text(self, path: Path, layout: TextLayout) -> Iterator[pa.RecordBatch]:
        first = True
        for share, block in read_blocks(path):
            self._advance(share, path)
            if first:
                block = block.removeprefix(b"\xef\xbb\xbf")
                block = block.partition(b"\n")[2] if layout.header else block
                first = False
            if block.strip():
                yield self._normalise(parse_block(block, layout, path), layout, path)

    def _normalise(self, table: pa.Table, layout: TextLayout, path: Path) -> pa.RecordBatch:
        columns: dict[str, pa.Array] = {}
        for name, source in zip(IDS, (layout.user, layout.item), strict=True):
            array = _take_column(table, source, path)
            columns[name] = self._encode(name, array) if layout.text_ids else array
        columns["timestamp"] = _describe_timestamps(path, layout).convert(
            _take_column(table, layout.time, path), self._unit
        )
        if layout.rating is not None:
            doubled = pc.round(
                pc.multiply(_take_column(table, layout.rating, path), 2.0), round_mode="half_up"
            )
            columns["action"] = doubled.cast(pa.int64())
        if layout.feedback:
            action = pa.repeat(pa.scalar(0, pa.int64()), table.num_rows)
            for name in layout.feedback:
                flag = _take_column(table, name, path)
                low, high = pc.min_max(flag).as_py().values()
                if low < 0 or high > 1:
                    wrong = high if high > 1 else low
                    raise ValueError(
                        f"{path}: column {name!r} holds {wrong}, not 0 or 1; mend or "
                        "drop those rows"
                    )
                action = pc.bit_wise_or(action, pc.shift_left(flag, FEEDBACK.index(name)))
                columns[name] = flag.cast(pa.int8())
            columns = (
                {n: columns[n] for n in REQUIRED}
                | {"action": action}
                | {n: columns[n] for n in layout.feedback}
            )
        return pa.RecordBatch.from_pydict(columns)

    def _encode(self, name: str, array: pa.Array) -> pa.Array:
        """Replaces strings by dense codes, in order of first appearance. The loop is over the
        distinct strings of the block, not over its events."""
        table = self.vocabulary.setdefault(name, {})
        encoded = array.dictionary_encode()  # its dictionary is in order of first appearance, too
        codes = pa.array(
            [table.setdefault(text, len(table)) for text in encoded.dictionary.to_pylist()],
            pa.int64(),
        )
        return codes.take(encoded.indices)


def read_interactions(
    path: str | Path | Sequence[str | Path], format: str = DataConfig.format
) -> Interactions:
    """Reads interaction files as a stream of record batches.

    Args:
        path: A file, or several of one kind.
        format: `auto`, or one of `text_formats.FORMATS`.

    Returns:
        An iterator over record batches with int64 columns user_id, item_id, timestamp, optional
        action, and further numeric columns.

    Raises:
        ValueError: A file is missing, empty, or not of the format. Reading raises it, too.
    """
    paths = [path] if isinstance(path, str | Path) else path
    return Interactions([Path(p) for p in paths], format)


def _describe_timestamps(path: Path, layout: TextLayout) -> TimestampFormat:
    return TimestampFormat(
        path,
        layout.time,
        layout.unit,
        shown="int64" if layout.unit is None else f"int64 ({layout.unit})",
    )


def _take_column(table: pa.Table, name: str, path: Path) -> pa.Array:
    chunks = table.column(name)
    if chunks.null_count:
        raise _make_null_error(path, name, chunks.null_count)
    return pa.concat_arrays(chunks.chunks) if chunks.num_chunks != 1 else chunks.chunk(0)


def _cast_to_int(array: pa.Array, name: str, path: Path) -> pa.Array:
    try:
        return array.cast(pa.int64())
    except pa.ArrowException as error:
        raise ValueError(
            f"{path}: column {name!r}: {shorten_error(error)}; ids must fit int64"
        ) from error


def _check_batch(batch: pa.RecordBatch, path: Path) -> None:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count:
            raise _make_null_error(path, name, column.null_count)
        if name in (*IDS, "action") and batch.num_rows:  # actions are read from a table too
            low = pc.min(column).as_py()
            if low < 0:
                raise ValueError(
                    f"{path}: column {name!r} holds {low}, not 0 or more; renumber "
                    "or drop such rows"
                )


def _make_null_error(path: Path, name: str, count: int) -> ValueError:
    return ValueError(
        f"{path}: column {name!r} has {count} null (missing) values; fill or drop those rows"
    )


def _describe_schema(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}:{field.type}" for field in schema)
