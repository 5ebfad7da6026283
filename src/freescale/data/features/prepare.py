"""Prepares the features of a run: reads --items, fits all features to the training part, and stores
them next to the prepared histories."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.config import DataConfig
from freescale.config.columns import parse_columns
from freescale.config.features import Feature, Request, request_features
from freescale.data.batches.specs import SplitSpec
from freescale.data.batches.windows import count_train_items, read_train_columns
from freescale.data.features.attributes import AttributeFile, open_attributes
from freescale.data.features.fitting import (
    Fitted,
    count_cut,
    encode_all,
    fit_feature,
    from_json,
    stack_rows,
    to_json,
)
from freescale.data.features.inference import Column, complete_kinds, infer_column
from freescale.data.features.store import ABOUT, CODES, IDS, KNOWN, FeatureStore, list_stored
from freescale.data.histories import HistoriesFile, is_histories
from freescale.data.ingest.digest import compute_digest, read_contents
from freescale.data.ingest.hashed_ids import HashedIds
from freescale.data.ingest.history_builder import Progress
from freescale.data.ingest.ids import VOCABULARY, find_vocabulary, is_huge, parse_integers
from freescale.data.ingest.layouts import Layout
from freescale.data.ingest.prepare import lock_cache
from freescale.data.ingest.sources import SourceFile, find_files
from freescale.data.ingest.tables import lay_out, read_tables
from freescale.data.values import BadValue, cast_values, decode_text, is_text
from freescale.data.workspace import explain_full_disk, workspace

_VERSION = 1
_SAMPLED = 1 << 20  # rows of the interactions by which kinds are inferred
_NUMBERS = 1 << 22  # training values of a number, by which its buckets are made


@dataclass(frozen=True)
class Sources:
    """The files that features come from."""

    events: SourceFile | None  # the first file of the interactions; None: histories
    layout: Layout | None  # of the events
    items: AttributeFile | None

    @property
    def event_names(self) -> list[str]:
        """Columns of the interactions that are not user, item or time."""
        if self.layout is None:
            return []
        roles = self.layout.roles
        used = [roles[role] for role in ("user", "item", "time") if role in roles]
        return [name for name in self.layout.names if name and name not in used]


def open_sources(config: DataConfig, cache: Path) -> Sources:
    """Finds out how the files are laid out. Reads no values."""
    first = find_files(config.data, cache)[0]
    events, layout = None, None
    if not (first.is_parquet and is_histories(first.path)):
        events, layout = first, lay_out(first, config.format, parse_columns(config.columns))
    if config.items is None:
        return Sources(events, layout, None)
    files = find_files(config.items, cache)
    if len(files) > 1:
        raise ValueError(f"--items {config.items}: {len(files)} files; give one")
    name = "item_id" if layout is None else layout.roles["item"]
    return Sources(events, layout, open_attributes(files[0], "item", name))


def get_request(config: DataConfig) -> Request:
    """The features that a run uses."""
    return request_features(config.features, config.schema, config.items is not None)


def find_columns(sources: Sources, request: Request) -> list[Feature]:
    """Says of which source each listed feature is; all columns if none are listed.

    Raises:
        ValueError: a column is in neither file, or in both.
    """
    names = {
        "item": [] if sources.items is None else sources.items.names,
        "event": sources.event_names,
    }
    if request.listed is None:
        return [Feature(n, source, None, (n,)) for source in request.all_of for n in names[source]]
    found = []
    for feature in request.listed:
        among = [feature.source] if feature.source else list(names)
        homes = [source for source in among if set(feature.columns) <= set(names[source])]
        if not homes:
            shown = "; ".join(
                f"{source}: {', '.join(columns)[:200] or 'none'}"
                for source, columns in names.items()
                if source in among
            )
            hint = "" if sources.items else " (attributes of items are in a file of --items)"
            raise ValueError(
                f"feature {feature.name!r}: column {' or '.join(map(repr, feature.columns))} is "
                f"missing; there are columns of {shown}{hint}; name one of these"
            )
        if len(homes) > 1:
            raise ValueError(
                f"feature {feature.name!r} is a column of the items and of the interactions; say "
                f"which: item.{feature.name} or event.{feature.name}"
            )
        found.append(replace(feature, source=homes[0]))
    return found


def sample_events(sources: Sources, names: Sequence[str]) -> dict[str, pa.Array]:
    """The first rows of columns of the interactions."""
    assert sources.events is not None and sources.layout is not None
    blocks: list[pa.Table] = []
    for block in read_tables(sources.events, sources.layout, list(names)):
        blocks.append(block.table)
        if sum(table.num_rows for table in blocks) >= _SAMPLED:
            break
    joined = pa.concat_tables(blocks, promote_options="permissive").slice(0, _SAMPLED)
    return {name: decode_text(joined.column(name).combine_chunks()) for name in names}


def declare_events(config: DataConfig, cache: Path) -> list[Feature]:
    """The event features of a run with their kinds. Reads the first rows of the interactions if
    these decide."""
    request = get_request(config)
    if not request:
        return []
    sources = open_sources(config, cache)
    features = [each for each in find_columns(sources, request) if each.source == "event"]
    if features and sources.layout is None:
        raise ValueError(
            f"{config.data}: a histories file, and event features ({features[0].name}) are made of "
            "interactions only: give those"
        )
    if all(feature.kind is not None for feature in features):
        return _refuse_lists(features)
    unknown = [feature.name for feature in features if feature.kind is None]
    values = sample_events(sources, unknown)
    columns = [infer_column(name, "event", values[name]) for name in unknown]
    if request.listed is None:
        columns = [column for column in columns if column.used and column.feature.kind != "multi"]
        return [column.feature for column in columns]
    return _refuse_lists(complete_kinds(features, columns))


def list_event_columns(config: DataConfig, cache: Path) -> list[str]:
    """The columns of the histories file that event features need."""
    declared = declare_events(config, cache)
    return list(dict.fromkeys(name for each in declared for name in list_stored(each)))


def _refuse_lists(features: list[Feature]) -> list[Feature]:
    for feature in features:
        if feature.kind == "multi":
            raise ValueError(
                f"feature event.{feature.name} is multi: only items have features of several "
                f"values; use {feature.name}=categorical, or a column of --items"
            )
    return features


def prepare_features(
    config: DataConfig,
    histories: Path,
    cache: Path,
    split: SplitSpec,
    *,
    any_ids: bool = False,
    trained: Path | None = None,
    progress: Progress | None = None,
) -> FeatureStore | None:
    """Makes the features of a run, or finds them in the cache. One process of a machine makes them.

    Args:
        config: the settings of the data.
        histories: the prepared histories of it.
        cache: the folder of prepared data.
        split: categories, buckets and popularity are those of its training part.
        any_ids: items are arbitrary ids of a dynamic table.
        trained: the statistics of a run (`FeatureStore.copy_statistics`), which count for any data.
            None fits them to this one.
        progress: called with a stage and the share done.

    Returns:
        None without features.

    Raises:
        ValueError: a value, a column or an option is not valid.
    """
    request, report = get_request(config), progress or (lambda stage, share: None)
    if not request:
        return None
    sources = open_sources(config, cache)
    paths = [] if sources.items is None else [sources.items.file.path]
    digests = read_contents(paths, cache / "digests", lambda share: report("hash items", share))
    file = HistoriesFile(histories, config.num_items, any_ids)
    fingerprint = compute_digest(
        _VERSION, file.fingerprint, file.num_items, [each.digest for each in digests],
        [asdict(each) for each in request.listed or ()], request.all_of, split.kind, split.time,
        any_ids,
    )  # fmt: skip
    known = None if trained is None else read_statistics(trained)
    if known is not None and known["fingerprint"] == fingerprint:
        known = None  # the run's own data: what is in the cache is the same
    key = compute_digest(fingerprint, str(histories.resolve()), known and known["fingerprint"])
    target = cache / f"features-{key}"
    if not target.is_dir():
        fix = "make room, or name a cache folder on another disk"
        with explain_full_disk(cache, f"preparing features of {histories}", fix, lambda: 0.0):
            cache.mkdir(parents=True, exist_ok=True)
            with lock_cache(cache), workspace(cache, key) as folder:
                if not target.is_dir():
                    making = _Making(
                        config, histories, file, cache, split, sources, request, known, trained
                    )
                    making.write(folder, fingerprint, report)
                    made = folder / "made"
                    os.replace(made, target)
    return FeatureStore(target)


def read_statistics(folder: Path) -> dict[str, Any]:
    """The statistics of a run."""
    found: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    return found


class _Making:
    """Makes the features of a run."""

    def __init__(
        self,
        config: DataConfig,
        histories: Path,
        file: HistoriesFile,
        cache: Path,
        split: SplitSpec,
        sources: Sources,
        request: Request,
        known: Mapping[str, Any] | None,
        trained: Path | None,
    ) -> None:
        self._trained, self._statistics = trained, known
        self._config, self._histories, self._file = config, histories, file
        self._cache, self._split, self._sources, self._request = cache, split, sources, request
        self._lines: list[str] = []

    def write(self, folder: Path, fingerprint: str, report: Progress) -> None:
        out = folder / "made"
        out.mkdir(exist_ok=True)
        items = self._fit_items(out, report)
        report("fit events", 0.0)
        events, texts = self._fit_events()
        report("fit events", 1.0)
        about = {
            "fingerprint": fingerprint,
            "num_items": self._num_items,
            "any_ids": self._file.any_ids,
            "item": to_json(items),
            "event": to_json(events),
            "event_texts": texts,
            "lines": self._lines,
        }
        (out / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")

    # ---- items

    def _fit_items(self, out: Path, report: Progress) -> list[Fitted]:
        source = self._sources.items
        self._num_items = self._file.num_items
        if source is None:
            self._write_known(out)
            return []
        declared = [e for e in find_columns(self._sources, self._request) if e.source == "item"]
        names = list(dict.fromkeys(name for each in declared for name in each.columns))
        report("read items", 0.0)
        table = source.read([source.key, *names])
        ids, extended = self._number_items(source, table.column(source.key).combine_chunks())
        columns = {name: table.column(name).combine_chunks() for name in names}
        if extended is not None:
            pq.write_table(extended, out / VOCABULARY)
        self._refuse_repeated(source, table.column(source.key), ids)
        report("read items", 1.0)
        report("fit items", 0.0)
        counts = self._count(ids)
        if self._statistics is not None:
            fitted = from_json(self._statistics["item"])
        else:
            fitted = []
            for feature in self._choose_kinds(declared, columns):
                with _naming(source.file, feature):
                    fitted.append(fit_feature(feature, columns, counts))
            fitted = stack_rows(fitted)
        self._write_items(out, fitted, columns, ids)
        self._describe_items(source, fitted, columns, ids, counts)
        report("fit items", 1.0)
        return fitted

    def _number_items(
        self, source: AttributeFile, values: pa.Array
    ) -> tuple[NDArray[np.int64], pa.Table | None]:
        """[n] ids as in the histories. Items that these do not have follow them; the second result
        is then the vocabulary of both, if ids are coded."""
        if values.null_count:
            row = pc.index(values.is_null(), pa.scalar(True)).as_py()
            raise ValueError(
                f"{source.file}, row {row + 1}: column {source.key!r} is missing; fill or drop the "
                "row"
            )
        if self._file.any_ids:
            return np.asarray(HashedIds(keep=False).encode(values), np.int64), None
        path = find_vocabulary(self._histories)
        known = None if path is None else pq.read_table(path)
        mine = None if known is None else known.filter(pc.equal(known.column("column"), "item_id"))
        if known is None or mine is None or not mine.num_rows:
            try:
                ids = np.asarray(parse_integers(values), np.int64)
            except Exception as error:
                raise ValueError(
                    f"{source.file}: column {source.key!r} holds {error}, and the item ids of the "
                    "interactions are integers; use the same ids in both"
                ) from None
            largest = int(ids.max(initial=-1))
            if is_huge(largest, self._file.num_items + len(ids)):
                raise ValueError(
                    f"{source.file}: item id {largest} of column {source.key!r} needs a table of "
                    f"as many rows; use ids below {10 * len(ids):,}, or text"
                )
            self._num_items = max(self._num_items, largest + 1)
            return ids, None
        text = values if is_text(values.type) else cast_values(values, pa.string(), "ids")
        texts = mine.sort_by("id").column("text").combine_chunks()
        found = pc.index_in(text, texts)
        new = pc.unique(text.filter(pc.is_null(found)))
        every = pa.concat_arrays([texts, new])
        ids = np.asarray(pc.index_in(text, every), np.int64)
        self._num_items = max(self._num_items, len(every))
        numbers = pa.array(np.arange(len(texts), len(every)))
        further = pa.table([pa.repeat("item_id", len(new)), numbers, new], schema=known.schema)
        return ids, pa.concat_tables([known, further])

    def _refuse_repeated(
        self, source: AttributeFile, values: pa.ChunkedArray, ids: NDArray[np.int64]
    ) -> None:
        ordered = np.argsort(ids, kind="stable")
        again = np.flatnonzero(np.diff(ids[ordered]) == 0)
        if len(again):
            first, second = sorted((int(ordered[again[0]]), int(ordered[again[0] + 1])))
            raise ValueError(
                f"{source.file}, rows {first + 1} and {second + 1}: column {source.key!r} holds "
                f"{values[second].as_py()!r} twice ({len(again):,} such rows); keep one row per "
                "item"
            )

    def _count(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] training events of items."""
        return count_train_items(self._file, self._split, ids)

    def _choose_kinds(
        self, declared: Sequence[Feature], columns: Mapping[str, pa.Array]
    ) -> list[Feature]:
        unknown = [each.name for each in declared if each.kind is None]
        inferred: list[Column] = [infer_column(n, "item", columns[n]) for n in unknown]
        if self._request.listed is not None:
            return complete_kinds(declared, inferred)
        left = [f"{c.feature.name} ({c.reason})" for c in inferred if not c.used]
        if left:
            self._lines.append(f"columns of the items left out: {', '.join(left)}")
        return [column.feature for column in inferred if column.used]

    def _write_items(
        self,
        out: Path,
        fitted: Sequence[Fitted],
        columns: Mapping[str, pa.Array],
        ids: NDArray[np.int64],
    ) -> None:
        if not fitted:
            self._write_known(out)
            return
        missing = encode_all(fitted, {name: pa.nulls(1) for name in columns})
        codes = encode_all(fitted, columns)
        if self._file.any_ids:
            order = np.argsort(ids)
            np.save(out / IDS, ids[order])
            np.save(out / CODES, np.concatenate([codes[order], missing]))
            return
        every = np.repeat(missing, self._num_items, axis=0)
        every[ids] = codes
        np.save(out / CODES, every)
        self._write_known(out)

    def _write_known(self, out: Path) -> None:
        if self._file.any_ids:
            return
        if self._statistics is not None and self._trained is not None:
            copyfile(self._trained / KNOWN, out / KNOWN)
            return
        np.save(out / KNOWN, self._count(np.arange(self._num_items)) > 0)

    def _describe_items(
        self,
        source: AttributeFile,
        fitted: Sequence[Fitted],
        columns: Mapping[str, pa.Array],
        ids: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> None:
        unused = int((counts == 0).sum())
        lines = [f"{source.file}: {len(ids):,} items by {source.key}"]
        if unused:
            lines[0] += f", {unused:,} of them without a training event"
        lines += [describe_fitted(each, columns) for each in fitted]
        if not self._file.any_ids:
            there = np.zeros(self._num_items, bool)
            there[ids] = True
            occur = self._count(np.arange(self._num_items)) > 0
            if without := int((occur & ~there).sum()):
                lines.append(
                    f"items of the training part that {source.file} does not have: {without:,}; "
                    "their features count as missing"
                )
        self._lines[:0] = lines

    # ---- events

    def _fit_events(self) -> tuple[list[Fitted], dict[str, list[str]]]:
        declared = declare_events(self._config, self._cache)
        texts = {
            name: _read_texts(self._histories, name)
            for each in declared if each.kind != "numeric" for name in each.columns
        }  # fmt: skip
        if self._statistics is not None:
            return from_json(self._statistics["event"]), texts
        fitted = []
        for feature in declared:
            name = list_stored(feature)[0]
            if feature.kind == "numeric":
                numbers = self._sample_numbers(name)
                given = {feature.columns[0]: pa.array(numbers)}
                fitted.append(fit_feature(feature, given, np.ones(len(numbers), np.int64)))
            else:
                known = texts[feature.columns[0]]
                counts = np.zeros(len(known) + 1, np.int64)  # the last: missing
                for (codes,) in read_train_columns(self._file, self._split, (name,)):
                    counts += np.bincount(codes + 1, minlength=len(counts))
                given = {feature.columns[0]: pa.array(known, pa.string())}
                fitted.append(fit_feature(feature, given, counts[1:]))
        self._lines += [describe_fitted(each, None) for each in fitted]
        return stack_rows(fitted), texts

    def _sample_numbers(self, name: str) -> NDArray[np.float64]:
        """Training values of a number, evenly spaced if there are many."""
        total = int(self._file.mean_length * self._file.num_samples)
        step = -(-total // _NUMBERS)
        parts = read_train_columns(self._file, self._split, (name,))
        return np.concatenate([np.asarray(values[::step], np.float64) for (values,) in parts])


def describe_fitted(fitted: Fitted, columns: Mapping[str, pa.Array] | None) -> str:
    """What a feature is and how its values are used, in one line."""
    feature = fitted.feature
    about = {
        "categorical": f"{len(fitted.categories):,} categories of the training part",
        "multi": f"{len(fitted.categories):,} categories, up to {fitted.places} of an item",
        "numeric": f"{len(fitted.edges) + 1} buckets with about equally many training values",
        "cross": f"{fitted.rows:,} rows for all combinations",
    }[feature.kind or ""]
    cut = count_cut(fitted, columns) if columns is not None else 0
    more = f"; {cut:,} values beyond the first {fitted.places} of an item left out" if cut else ""
    return f"feature {feature.label} ({feature.kind}): {about}{more}"


def _read_texts(histories: Path, column: str) -> list[str]:
    path = find_vocabulary(histories)
    if path is None:
        return []
    table = pq.read_table(path)
    mine = table.filter(pc.equal(table.column("column"), f"category.{column}")).sort_by("id")
    found: list[str] = mine.column("text").to_pylist()
    return found


class _naming:
    """Adds file and row to the error of a bad value."""

    def __init__(self, file: SourceFile, feature: Feature) -> None:
        self._file, self._feature = file, feature

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BadValue):
            where = "" if error.row is None else f", row {error.row + 1}"
            columns = ", ".join(map(repr, self._feature.columns))
            raise ValueError(
                f"{self._file}{where}: column {columns} {error.problem}; {error.fix}"
            ) from None
