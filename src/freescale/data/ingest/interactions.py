"""Reads interaction files (one event per row) as a stream of record batches with the same columns
for every format.

| format         | files                                                     | action           |
|----------------|-----------------------------------------------------------|------------------|
| parquet        | user, item, time; further numeric columns are kept        | column `action`  |
| csv            | a header and any separator; RecBole's `.inter`            | action or rating |
| jsonl          | one JSON object a line                                    | action or rating |
| pairs          | `user item` lines, in order of time                       |                  |
| sequences      | the items of a user a line                                |                  |
| user-sequences | a user and its items a line                               |                  |
| movielens      | ratings.dat (`::`), u.data (tabs), ratings.csv            | rating           |
| amazon         | ratings csv with or without header, reviews as json lines | rating           |
| kuairand       | log csv; 0/1 feedback columns are kept as side columns    | feedback as bits |
| yambda         | multi_event.parquet; listen_plus and is_organic are kept  | event_type       |

A rating becomes the action round(2 * rating). Timestamps keep the unit of the file: rounding to
seconds would lose the order of events. Several files are brought to the finest unit among them.
Memory is one block of the file; the codes of ids that are not integers (ids.py) need memory for the
catalogue and the users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from freescale.config import DataConfig, ModelConfig
from freescale.config.columns import Label, parse_columns, parse_labels
from freescale.config.data import FORMATS
from freescale.data.feature_values import read_keys, read_numbers
from freescale.data.ingest import yambda
from freescale.data.ingest.column_names import require_column
from freescale.data.ingest.hashed_ids import HashedIds
from freescale.data.ingest.ids import (
    Known,
    NotIntegers,
    ReadDifferently,
    Reading,
    Vocabulary,
    parse_integers,
)
from freescale.data.ingest.layouts import FEEDBACK, Layout
from freescale.data.ingest.sources import SourceFile, find_files
from freescale.data.ingest.tables import (
    TableBlock,
    is_empty,
    lay_out,
    list_side_columns,
    read_tables,
)
from freescale.data.ingest.timestamps import (
    FinerTimes,
    TimestampFormat,
    UnitCheck,
    choose_unit,
    detect_timestamps,
)
from freescale.data.labels import find_non_label, make_label
from freescale.data.values import decode_text, parse_numbers, refuse_any, refuse_nulls

IDS = ("user_id", "item_id")
REQUIRED = (*IDS, "timestamp")


def make_action(ratings: pa.Array) -> pa.Array:
    doubled = pc.round(pc.multiply(parse_numbers(ratings), 2.0), round_mode="half_up")
    action = doubled.cast(pa.int64())
    fix = "fix it, or leave ratings out: --columns rating="
    refuse_any(pc.less(action, 0), ratings, "holds {}, and a rating is 0 or more", fix)
    return action


def make_feedback_action(block: TableBlock, names: Sequence[str]) -> Mapping[str, pa.Array]:
    flags = {name: block.convert(name, _parse_flag) for name in names}
    action = pa.repeat(pa.scalar(0, pa.int64()), block.table.num_rows)
    for name, flag in flags.items():
        action = pc.bit_wise_or(action, pc.shift_left(flag.cast(pa.int64()), FEEDBACK.index(name)))
    return {"action": action, **flags}


def translate_yambda(block: TableBlock) -> Mapping[str, pa.Array]:
    kind, played, organic = yambda.READ
    share = block.get_values(played)
    action = block.convert(kind, lambda kinds: yambda.make_actions(kinds, share))
    plus = pc.equal(action, yambda.LISTEN_PLUS).cast(pa.int8())
    return dict(zip(yambda.MADE, (action, plus, block.convert(organic, _parse_flag)), strict=True))


def _parse_flag(values: pa.Array) -> pa.Array:
    numbers = parse_numbers(values)
    wrong = pc.invert(pc.or_(pc.equal(numbers, 0.0), pc.equal(numbers, 1.0)))
    refuse_any(wrong, values, "holds {}, not 0 or 1", "fix or drop those rows")
    return numbers.cast(pa.int8())


def parse_side(values: pa.Array) -> pa.Array:
    refuse_nulls(values)
    return values.cast(pa.int8()) if pa.types.is_boolean(values.type) else values


class Interactions(Iterator[pa.RecordBatch]):
    """Record batches of files. `vocabulary`, `fraction`, `no_labels` and `missing_rows` grow on
    reading."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        format: str,
        columns: str = "",
        labels: str = "",
        missing: str = "refuse",
        any_ids: bool = False,
        vocabulary: bool = True,
        events: Sequence[str] = (),
        known: Known | None = None,
        hash_all: bool = False,
    ):
        """`any_ids`: items are 64-bit ids or hashed to them; `vocabulary` keeps the hashed texts;
        `hash_all`: so are users and actions. `events`: features to keep, as `category.COLUMN`
        (numbered in order of appearance, -1 if missing), `number.COLUMN` (NaN if missing) or
        `id.COLUMN` (hashed). `known`: texts of ids that keep their numbers; ids of other columns
        are integers."""
        if format not in ("auto", *FORMATS):
            raise ValueError(f"unknown format {format!r}: choose auto, {', '.join(FORMATS)}")
        self.files = [file for file in files if not is_empty(file)]
        self.empty_files = len(files) - len(self.files)  # left by programs that write in parts
        if not self.files:
            raise _explain_empty(files[0])
        self._drop = missing == "drop"
        hashed = (*IDS, "action") if hash_all else ("item_id",) if any_ids else ()
        self._hashed, self._keeps_texts = hashed, vocabulary
        given = parse_columns(columns)
        self.features = {name: name.partition(".")[2] for name in events}
        self.layouts = [lay_out(file, format, given) for file in self.files]
        self.sides = self._find_sides()  # of Parquet files: kept, and not kept
        # without those that are columns already
        self.labels = [label for label in parse_labels(labels) if not self._has_column(label)]
        for file, layout in zip(self.files, self.layouts):
            for label in self.labels:
                what = f", of --labels {label.text},"
                require_column(file, label.column, layout.names, what)
            for column in self.features.values():
                fix = "add it to all files, or leave the feature out"
                require_column(file, column, layout.names, ", a feature,", fix)
        self._known = None if known is None else dict(known)
        if any_ids and self._known:
            self._known.pop("item_id", None)  # texts of hashes
        coded = {*IDS, "action"} & (self._known or {}).keys()
        self.restart(Reading(dict.fromkeys(coded, "strings")))

    def restart(self, reading: Reading) -> None:
        """Reads from the beginning again, with new findings."""
        self.reading = reading
        for name, reason in reading.coded.items():
            if self._known is not None and name not in self._known:
                raise self._refuse_ids(name, reason, "integers")
        self.vocabulary = Vocabulary(self._known)
        self.hashers = {name: HashedIds(self._keeps_texts) for name in self._hashed}
        self.hashed = self.hashers.get("item_id")
        # column -> file, column there, value that is not 0 or 1
        self.no_labels: dict[str, tuple[str, str, str]] = {}
        self.fraction = 0.0  # share of bytes or rows read so far
        self._bytes = 0  # of the batches so far
        self.missing_rows = 0  # dropped
        self._events = self._lines = 0
        self._done, self._total = 0, sum(file.size for file in self.files)
        self._batches = self._read()
        self._begun = False

    def refuse_unknown(self) -> None:
        """Raises ValueError, after reading, if no id of a column is a known one."""
        for name in self.vocabulary.unmet.keys() & self.reading.coded.keys():
            codes = list(self.vocabulary.columns[name])
            raise self._refuse_ids(name, f"other ids, as {codes[-1]!r}", f"ids as {codes[0]!r}")

    def _refuse_ids(self, name: str, found: str, known: str) -> ValueError:
        role = name.partition("_")[0]
        return ValueError(
            f"{self.files[0]}: column {self.layouts[0].roles.get(role, role)!r} holds {found}, and "
            f"the run knows {known}: give the same ids, or train a new run"
        )

    @property
    def formats(self) -> list[str]:
        return [layout.format for layout in self.layouts]

    def __next__(self) -> pa.RecordBatch:
        while True:
            try:
                batch = next(self._batches)
            except ReadDifferently as found:
                if self._begun:
                    raise
                self.restart(found.reading)
            else:
                self._begun = True
                self._bytes += batch.nbytes
                return batch

    def estimate_bytes(self) -> float:
        """Of all batches; 0 before the first."""
        return self._bytes / self.fraction if self.fraction else 0.0

    def _find_sides(self) -> tuple[list[str], list[str]]:
        """Numeric columns of Parquet files: kept, and not kept."""
        complete: dict[str, None] = {}
        broken: dict[str, None] = {}
        for file, layout in zip(self.files, self.layouts):
            if layout.format == "parquet":
                found, missing = list_side_columns(file, layout)
                complete |= dict.fromkeys(found)
                broken |= dict.fromkeys(missing)
        common = set.intersection(*(set(layout.names) for layout in self.layouts))
        return [n for n in complete if n not in broken and n in common], list(broken)

    def _has_column(self, label: Label) -> bool:
        if label.operator is not None:
            return False
        layout = self.layouts[0]
        made = bool({"action", "rating"} & set(layout.roles) or layout.feedback)
        kept = self.sides[0] if layout.format == "parquet" else layout.feedback
        kept = yambda.MADE if layout.format == "yambda" else kept
        return label.name in kept or (label.name == "action" and made)

    def _read(self) -> Iterator[pa.RecordBatch]:
        schema: pa.Schema | None = None
        self.times = self._detect_times()
        times = list(self.times.values())
        self._units = {file: UnitCheck() for file in self.times}
        unit = choose_unit(times) if len(self.files) > 1 else None
        for file, layout in zip(self.files, self.layouts):
            events = 0
            needed = self._list_needed(layout)
            for block in read_tables(file, layout, needed, self._lines):
                self.fraction = min((self._done + block.share * file.size) / self._total, 1.0)
                batch = self._normalise(block, layout, unit)
                if schema is not None and batch.schema != schema:
                    raise ValueError(
                        f"{file}: columns {_describe_schema(batch.schema)} differ from those of "
                        f"{self.files[0]}: {_describe_schema(schema)}; give files of one kind"
                    )
                schema = batch.schema
                self._note_labels(batch, file, layout)
                events += batch.num_rows
                if batch.num_rows:
                    yield batch
            if not events:
                raise _explain_empty(file)
            self._done += file.size
        self.fraction = 1.0

    def _list_needed(self, layout: Layout) -> list[str]:
        sides = self.sides[0] if layout.format == "parquet" else ()
        needed = [
            *layout.roles.values(),
            *layout.feedback,
            *(label.column for label in self.labels),
            *self.features.values(),
            *(name for name in sides if name in layout.names),
        ]
        return list(dict.fromkeys(needed))

    def _detect_times(self) -> dict[SourceFile, TimestampFormat]:
        """The timestamp format of each file, from its first block."""
        found = {}
        for file, layout in zip(self.files, self.layouts):
            column = layout.roles.get("time")
            if column is None:
                continue
            first = next(read_tables(file, layout, [column]), None)
            values = pa.nulls(0) if first is None else first.get_values(column)
            times = detect_timestamps(file, column, values, layout.unit)
            for _ in range(self.reading.finer.get(str(file), 0)):
                times = times.refine()
            found[file] = times
        return found

    def _normalise(self, block: TableBlock, layout: Layout, unit: str | None) -> pa.RecordBatch:
        roles = layout.roles
        if self._drop:
            kept = block.drop_rows([roles[r] for r in ("user", "item", "time") if r in roles])
            self.missing_rows += block.table.num_rows - kept.table.num_rows
            block = kept
        columns = {
            "user_id": self._parse_ids("user_id", block, roles["user"]),
            "item_id": self._parse_ids("item_id", block, roles["item"]),
            "timestamp": self._parse_times(block, unit),
        }
        if layout.format == "sequences" and block.table.num_rows:
            self._lines = columns["user_id"][-1].as_py() + 1
        if "action" in roles:
            columns["action"] = self._parse_ids("action", block, roles["action"])
        elif "rating" in roles:
            columns["action"] = block.convert(roles["rating"], make_action)
        if layout.format == "yambda":
            columns |= translate_yambda(block)
        elif layout.feedback:
            columns |= make_feedback_action(block, layout.feedback)
        if layout.format == "parquet":
            for name in self.sides[0]:
                if name in layout.names:
                    columns[name] = block.convert(name, parse_side)
        for name, column in self.features.items():
            read: Callable[[pa.Array], Any] = partial(self._number, name)
            if name.startswith("number."):
                read = read_numbers
            elif name.startswith("id."):
                read = _hash
            columns[name] = pa.array(block.convert(column, read))
        for label in self.labels:
            columns[label.name] = block.convert(label.column, partial(make_label, label))
        return pa.RecordBatch.from_pydict(columns)

    def _number(self, name: str, values: pa.Array) -> NDArray[np.int64]:
        """Numbers categories in order of appearance; -1 if missing."""
        keys = read_keys(decode_text(values))
        found = np.full(len(keys), -1)
        found[np.asarray(pc.is_valid(keys))] = self.vocabulary.encode(name, keys.drop_null())
        return found

    def _parse_ids(self, name: str, block: TableBlock, column: str) -> pa.Array:
        encode: Callable[[pa.Array], pa.Array] = parse_integers
        if name in self.hashers:
            encode = self.hashers[name].encode
        elif name in self.reading.coded:
            encode = partial(self.vocabulary.encode, name)
        try:
            return block.convert(column, lambda values: encode(decode_text(values)))
        except NotIntegers as reason:
            raise ReadDifferently(
                f"{block.file}: column {column!r} holds {reason} after integers; `prepare` reads "
                "such files",
                self.reading.code(name, str(reason)),
            ) from None

    def _parse_times(self, block: TableBlock, unit: str | None) -> pa.Array:
        rows = block.table.num_rows
        self._events += rows
        times = self.times.get(block.file)
        if times is None:
            return pa.array(np.arange(self._events - rows, self._events))
        try:
            return block.convert(
                times.column,
                lambda values: times.convert(times.parse(values, self._units[block.file]), unit),
            )
        except FinerTimes:
            raise ReadDifferently(
                f"{block.file}: column {times.column!r} holds fractions after whole numbers; "
                "`prepare` reads such files",
                self.reading.refine(str(block.file)),
            ) from None

    def _note_labels(self, batch: pa.RecordBatch, file: SourceFile, layout: Layout) -> None:
        for name in batch.schema.names:
            if name in REQUIRED or name in self.no_labels:
                continue
            if value := find_non_label(batch.column(name).to_numpy()):
                made = name == "action" and "action" not in layout.roles
                source = layout.roles.get("rating", "feedback") if made else name
                column = f"'action' (made of {source!r})" if made else repr(name)
                shown = str(file) if "://" in str(file) else str(Path(str(file)).absolute())
                self.no_labels[name] = shown, column, value


def read_interactions(
    path: str | Path | Sequence[str | Path],
    format: str = DataConfig.format,
    *,
    columns: str = DataConfig.columns,
    labels: str = ModelConfig.labels,
    missing: str = DataConfig.missing,
    cache: Path | None = None,
) -> Interactions:
    """Reads interaction files as a stream of record batches.

    Args:
        path: A file, a pattern, a folder or a URL, or several of one kind.
        format: `auto`, or one of `config.data.FORMATS`.
        columns: Columns by role, as `user=reviewer,item=sku,time=date`, if their names are not
            recognised.
        labels: Label columns to read or make, as `is_click,like=rating>=4`.
        missing: `drop` leaves out rows without user, item or time, `refuse` raises.
        cache: The folder to which files behind URLs are copied.

    Returns:
        An iterator over record batches with int64 columns user_id, item_id, timestamp, optional
        action, and further numeric columns.

    Raises:
        ValueError: A file is missing, empty, or not of the format. Reading raises it, too.
    """
    return Interactions(find_files(path, cache), format, columns, labels, missing)


class NoEvents(ValueError):
    """A file is empty."""


def _hash(values: pa.Array) -> pa.Array:
    return HashedIds(keep=False).encode(decode_text(values))


def _explain_empty(file: SourceFile) -> NoEvents:
    return NoEvents(f"{file}: the file has no events (0 rows); give a file with events")


def _describe_schema(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}:{field.type}" for field in schema)
