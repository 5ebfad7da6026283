"""The features of a flat table: declared, fitted to its training part, kept for other data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freescale.config.columns import Label, parse_columns, parse_labels
from freescale.config.features import Feature, parse_features, read_schema, write_schema
from freescale.data.feature_values import read_key_lists, read_keys, read_numbers
from freescale.data.features.attributes import lay_out_table, read_sample
from freescale.data.features.fitting import (
    MOST_VALUES,
    Fitted,
    count_keys,
    count_rows,
    fit_feature,
    from_json,
    stack_rows,
    to_json,
)
from freescale.data.features.inference import complete_kinds, infer_column
from freescale.data.ingest.column_names import find_roles, require_column
from freescale.data.ingest.layouts import Layout
from freescale.data.ingest.sources import SourceFile, find_files
from freescale.data.ingest.tables import TableBlock, is_empty, read_tables
from freescale.data.labels import make_label
from freescale.data.values import decode_text

IDS = ("user", "item")
_RESERVED = {"labels", *IDS, *(f"{x}_{kind}" for x in IDS for kind in ("features", "own"))}
_NUMBERS = 1 << 22  # training values of a number, at most, by which its buckets are made
_NO_KEYS = pa.table({"key": pa.array([], pa.string()), "count": pa.array([], pa.int64())})
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


@dataclass(frozen=True)
class Schema:
    """Which columns of a flat table, with a row for each sample, are features.

    Features named `item.` or `user.` describe the item or user together; any other is a column of
    batches by itself. Users and items are categories, too. `source` is a file, a folder, a pattern
    or several, of any format, or an Arrow table; `where`, as `day<20`, chooses rows of it.

    ```python
    schema = Schema.infer("day1.parquet", "item.category,item.price,hour", where="part==train")
    fitted = schema.fit("day1.parquet", where="part==train")
    fitted.write("features.json")  # for other days: Schema.read("features.json")
    ```

    Attributes:
        features: as declared, with kinds.
        tables: fitted features by column of a batch, which is a table of a model.
        notes: what the columns hold, by label of the feature.
    """

    features: tuple[Feature, ...]
    tables: Mapping[str, tuple[Fitted, ...]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict, compare=False)

    @staticmethod
    def infer(
        source: Source | pa.Table,
        features: str = "",
        *,
        labels: str = "",
        columns: str = "",
        where: str = "",
    ) -> Schema:
        """Infers the kinds of features from the first million rows of the training part that
        `where` chooses. `features`: as for `--features`; empty: all columns but those of user,
        item, time, `where` and `labels` (as for `FlatTable`). `columns`: user and item, as
        `user=reviewer,item=sku`, if not recognised by name."""
        rows = FlatRows(source, where)
        if features:
            listed = [replace(f, source=f.source or "event") for f in parse_features(features)]
            return _complete_kinds(rows, listed)
        used = {*rows.find_roles(columns).values(), *(one.column for one in parse_labels(labels))}
        used |= {rows.where.column} if rows.where else set()
        listed = [Feature(n, "event", None, (n,)) for n in rows.names if n not in used]
        return _complete_kinds(rows, listed, leave_out=True)

    @staticmethod
    def read(path: str | Path) -> Schema:
        """Reads a schema file, or, as `.json`, a fitted schema."""
        if Path(path).suffix != ".json":
            return Schema(read_schema(Path(path)))
        tables = json.loads(Path(path).read_text(encoding="utf-8"))["tables"]
        fitted = {name: tuple(from_json(entries)) for name, entries in tables.items()}
        features = [each.feature for name, of in fitted.items() if name not in IDS for each in of]
        return Schema(tuple(features), fitted)

    def write(self, path: str | Path) -> None:
        """Writes a schema file, or, as `.json`, the fitted schema."""
        text = write_schema(self.features, self.notes)
        if Path(path).suffix == ".json":
            tables = {name: to_json(of) for name, of in self.get_tables().items()}
            text = json.dumps({"tables": tables}, indent=1) + "\n"
        Path(path).write_text(text, encoding="utf-8")

    def fit(self, source: Source | pa.Table, *, columns: str = "", where: str = "") -> Schema:
        """Finds ids, categories and buckets of the training part, with a pass over it for each
        column. Memory: the categories of one column, or 4 million numbers. ValueError for a column
        or value that is not valid, with file, row, column and value."""
        rows = FlatRows(source, where)
        declared = _complete_kinds(rows, self.features)
        groups = {
            role: [Feature(role, role, "categorical", (name,))]
            for role, name in rows.find_roles(columns).items()
            if role in IDS
        }
        for feature in declared.features:
            own = feature.source == "event"
            if feature.kind == "vector" or (own and feature.name in _RESERVED):
                problem = "a vector" if feature.kind == "vector" else "a column of every batch"
                raise ValueError(f"feature {feature.label} is {problem}; rename or leave it out")
            group = feature.name if own else f"{feature.source}_features"
            groups.setdefault(group, []).append(feature)
        tables = {n: tuple(stack_rows(_fit(rows, f) for f in of)) for n, of in groups.items()}
        return replace(declared, tables=tables)

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each table. Row 0 is nothing."""
        return {name: count_rows(of) for name, of in self.get_tables().items()}

    def get_tables(self) -> Mapping[str, tuple[Fitted, ...]]:
        if not self.tables:
            raise ValueError("the schema is not fitted: call fit with the training part first")
        return self.tables

    @property
    def columns(self) -> list[str]:
        """The columns of a flat table that are read."""
        tables = self.get_tables().values()
        return [name for of in tables for each in of for name in each.feature.columns]

    def encode(self, block: TableBlock) -> NDArray[np.int32]:
        """[n, places] rows of the tables, one table after another."""
        columns = {name: block.get_values(name) for name in self.columns}

        def encode(fitted: Fitted) -> NDArray[np.int32]:
            name = fitted.feature.columns[0]  # to be named if a value is bad
            return block.convert(name, lambda values: fitted.encode(columns))

        return np.concatenate([encode(x) for of in self.get_tables().values() for x in of], 1)


def _complete_kinds(rows: FlatRows, features: Sequence[Feature], leave_out: bool = False) -> Schema:
    """Infers missing kinds. A feature without a usable kind is refused, or left out."""
    names = [each.columns[0] for each in features if each.kind is None]
    if not names:
        return Schema(tuple(features))
    sample = read_sample(rows.read(names), names)
    found = [
        infer_column(each.name, each.source, sample[each.columns[0]])
        for each in features if each.kind is None
    ]  # fmt: skip
    if leave_out:
        used = [column for column in found if column.used and column.feature.kind != "vector"]
        features = [column.feature for column in used]
    notes = {column.feature.label: column.describe() for column in found}
    return Schema(tuple(complete_kinds(features, found)), notes=notes)


def _fit(rows: FlatRows, feature: Feature) -> Fitted:
    """Fits a feature, block by block."""
    name, numbers, keys = feature.columns[0], np.empty(0), _NO_KEYS
    places, count, step = 1, 0, 1
    for block in rows.read(feature.columns):
        if feature.kind == "cross":
            break  # the columns are there; its rows are hashes
        if feature.kind == "numeric":
            values = block.convert(name, read_numbers)
            numbers = np.append(numbers, values[-count % step :: step])  # every step-th row
            count += len(values)
            while len(numbers) > _NUMBERS:
                numbers, step = numbers[::2], 2 * step
            continue
        if feature.kind == "id":
            values = block.convert(name, read_numbers)
            numbers = np.array([np.nanmax([-1.0, *numbers, *values])])
            continue
        if feature.kind == "multi":
            read = partial(read_key_lists, separator=feature.separator)
            found, sizes = block.convert(name, read)
            places = max(places, min(int(sizes.max(initial=1)), MOST_VALUES))
        else:
            found = block.convert(name, read_keys)
        further = pa.table({"key": found, "count": np.ones(len(found), np.int64)})
        keys = count_keys([keys, further])
    if feature.kind in ("numeric", "cross", "id"):
        return fit_feature(feature, {name: pa.array(numbers)}, np.ones(len(numbers), np.int64))
    plain = replace(feature, kind="categorical")
    counts = keys.column("count").to_numpy()
    fitted = fit_feature(plain, {name: keys.column("key").combine_chunks()}, counts)
    return replace(fitted, feature=feature, places=places)
