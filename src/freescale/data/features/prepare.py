"""Prepares the features of a run: reads the files of attributes, fits all features to the training
part, and stores them next to the prepared histories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.config import DataConfig
from freescale.config.features import OF_EVENTS, Feature, Request
from freescale.data.batches.specs import SplitSpec
from freescale.data.batches.windows import (
    count_train_events,
    count_train_items,
    read_train_columns,
)
from freescale.data.feature_values import read_vectors
from freescale.data.features.attributes import AttributeFile, naming
from freescale.data.features.fitting import (
    Fitted,
    describe_fitted,
    encode_all,
    fit_feature,
    from_json,
    stack_rows,
    to_json,
)
from freescale.data.features.inference import Column, complete_kinds
from freescale.data.features.numbering import number_items, number_users, refuse_repeated
from freescale.data.features.sources import (
    Sources,
    declare_events,
    find_columns,
    get_request,
    open_sources,
)
from freescale.data.features.store import (
    ABOUT,
    CODES,
    IDS,
    USERS,
    WEIGHTS,
    FeatureStore,
    list_stored,
    name_vectors,
)
from freescale.data.histories import HistoriesFile
from freescale.data.ingest.digest import compute_digest, read_contents
from freescale.data.ingest.history_builder import Progress
from freescale.data.ingest.ids import (
    VOCABULARY,
    find_vocabulary,
)
from freescale.data.ingest.prepare import make_folder

_VERSION = 2
_EVENTS = 10  # training events with which an item's own row counts half
_NUMBERS = 1 << 22  # training values of a number, by which its buckets are made


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
    paths = [source.file.path for source in sources.attributes.values()]
    digests = read_contents(paths, cache / "digests", lambda share: report("hash", share))
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

    def make(folder: Path) -> None:
        making = _Making(config, histories, file, cache, split, sources, request, known, trained)
        making.write(folder, fingerprint, report)

    return FeatureStore(make_folder(cache, f"features-{key}", f"features of {histories}", make))


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

    def write(self, out: Path, fingerprint: str, report: Progress) -> None:
        items = self._fit_items(out, report)
        users = self._fit_users(out, report)
        report("fit events", 0.0)
        of_events, texts = self._fit_events()
        report("fit events", 1.0)
        about = {
            "fingerprint": fingerprint,
            "num_items": self._num_items,
            "any_ids": self._file.any_ids,
            "item": to_json(items),
            "user": to_json(users),
            **{source: to_json(fitted) for source, fitted in of_events.items()},
            "event_texts": texts,
            "lines": self._lines,
        }
        (out / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")

    # ---- items

    def _fit_items(self, out: Path, report: Progress) -> list[Fitted]:
        self._num_items = self._file.num_items
        source = self._sources.attributes.get("item")
        if source is None:
            return []
        declared, table = self._read(source, report)
        values = table.column(source.key).combine_chunks()
        ids, self._num_items, vocabulary = number_items(source, values, self._file)
        refuse_repeated(source, values, ids)
        if vocabulary is not None:
            pq.write_table(vocabulary, out / VOCABULARY)
        if self._file.any_ids:
            counts = count_train_items(self._file, self._split, ids)
        else:
            every = np.arange(self._num_items)
            events = count_train_items(self._file, self._split, every)
            counts, known = events[ids], events > 0
            self._write_weights(out, events)
        fitted, columns = self._fit(source, declared, table, counts, report)
        self._write_items(out, source, fitted, columns, ids)
        unused = int((counts == 0).sum())
        line = f"{source.file}: {len(ids):,} items by {source.key}"
        line += f", {unused:,} of them without a training event" if unused else ""
        if not self._file.any_ids:
            known[ids] = False
            line += f"; {int(known.sum()):,} items of the training part have no row, which counts "
            line += "as missing"
        self._lines.append(line)
        return fitted

    def _read(self, source: AttributeFile, report: Progress) -> tuple[list[Feature], pa.Table]:
        report(f"read {source.role}s", 0.0)
        listed = find_columns(self._sources, self._request)
        declared = [feature for feature in listed if feature.source == source.role]
        names = list(dict.fromkeys(name for each in declared for name in each.columns))
        table = source.read([source.key, *names])
        report(f"read {source.role}s", 1.0)
        keys = table.column(source.key)
        if keys.null_count:
            row = pc.index(keys.is_null(), pa.scalar(True)).as_py()
            raise ValueError(
                f"{source.file}, row {row + 1}: column {source.key!r} is missing; fill or drop the "
                "row"
            )
        return declared, table

    def _fit(
        self,
        source: AttributeFile,
        declared: Sequence[Feature],
        table: pa.Table,
        counts: NDArray[np.int64],
        report: Progress,
    ) -> tuple[list[Fitted], dict[str, pa.Array]]:
        """The features of a source, by how often each of its rows [n] is in the training part; and
        its columns."""
        report(f"fit {source.role}s", 0.0)
        columns = {n: table.column(n).combine_chunks() for n in table.column_names[1:]}
        if self._statistics is not None:
            fitted = from_json(self._statistics[source.role])
        else:
            fitted = []
            for feature in self._choose_kinds(source, declared, columns):
                with naming(source.file, feature):
                    fitted.append(fit_feature(feature, columns, np.minimum(counts, 1)))
            fitted = stack_rows(fitted)
        self._lines += [describe_fitted(each, columns) for each in fitted]
        report(f"fit {source.role}s", 1.0)
        return fitted, columns

    def _fit_users(self, out: Path, report: Progress) -> list[Fitted]:
        source = self._sources.attributes.get("user")
        if source is None:
            return []
        declared, table = self._read(source, report)
        values = table.column(source.key).combine_chunks()
        ids = number_users(source, values, self._file)
        refuse_repeated(source, values, ids)
        users = pq.read_table(self._histories, columns=["user_id"]).column("user_id").to_numpy()
        order = np.argsort(ids)
        place = np.searchsorted(ids[order], users).clip(max=len(ids) - 1)
        row = np.where(ids[order][place] == users, order[place], -1)
        trained = (row >= 0) & (count_train_events(self._file, self._split) > 0)
        counts = np.bincount(row[trained], minlength=len(ids))
        fitted, columns = self._fit(source, declared, table, counts, report)
        unused, without = len(ids) - len(np.unique(row[row >= 0])), int((row < 0).sum())
        line = f"{source.file}: {len(ids):,} users by {source.key}"
        line += f", {unused:,} of them not in the data" if unused else ""
        line += f"; {without:,} users of the data have no row, which counts as missing"
        self._lines.append(line)
        if fitted:
            missing = encode_all(fitted, {name: pa.nulls(1) for name in columns})
            np.save(out / USERS, np.concatenate([encode_all(fitted, columns), missing])[row])
        return fitted

    def _choose_kinds(
        self,
        source: AttributeFile,
        declared: Sequence[Feature],
        columns: Mapping[str, pa.Array],
    ) -> list[Feature]:
        unknown = [each.name for each in declared if each.kind is None]
        inferred: list[Column] = [source.infer(n, columns[n]) for n in unknown]
        if self._request.listed is not None:
            chosen = complete_kinds(declared, inferred)
            for feature in chosen if source.role == "user" else ():
                if feature.kind == "vector":
                    raise ValueError(
                        f"feature user.{feature.name} is a vector: items have vectors, users have "
                        "categories and numbers; leave it out"
                    )
            return chosen
        left = [f"{c.feature.name} ({c.reason})" for c in inferred if not c.used]
        if left:
            self._lines.append(f"columns of the {source.role}s left out: {', '.join(left)}")
        return [column.feature for column in inferred if column.used]

    def _write_items(
        self,
        out: Path,
        source: AttributeFile,
        fitted: Sequence[Fitted],
        columns: Mapping[str, pa.Array],
        ids: NDArray[np.int64],
    ) -> None:
        if not fitted:
            return
        missing = encode_all(fitted, {name: pa.nulls(1) for name in columns})
        codes = encode_all(fitted, columns)
        for number, each in enumerate(fitted):
            if each.width:
                vectors = _encode_vectors(source, each, columns)
                order = np.argsort(np.argsort(ids)) if self._file.any_ids else ids
                count = len(ids) if self._file.any_ids else self._num_items
                padded = np.zeros((count + 1, each.width), np.float16)  # zeros: without a vector
                if vectors.shape[1]:  # none if all are missing
                    padded[order] = vectors
                np.save(out / name_vectors(number), padded)
        if self._file.any_ids:
            order = np.argsort(ids)
            np.save(out / IDS, ids[order])
            np.save(out / CODES, np.concatenate([codes[order], missing]))
            return
        every = np.repeat(missing, self._num_items, axis=0)
        every[ids] = codes
        np.save(out / CODES, every)

    def _write_weights(self, out: Path, events: NDArray[np.int64]) -> None:
        """[items]: how much an item's own row counts. For other data than the run's: as there."""
        if self._statistics is not None and self._trained is not None:
            copyfile(self._trained / WEIGHTS, out / WEIGHTS)
        else:
            np.save(out / WEIGHTS, (events / (events + _EVENTS)).astype(np.float32))

    # ---- events

    def _fit_events(self) -> tuple[dict[str, list[Fitted]], dict[str, list[str]]]:
        """The features of events and requests, by source, and the texts of their columns."""
        declared = declare_events(self._config, self._cache)
        texts = {
            name: _read_texts(self._histories, name)
            for each in declared if each.kind != "numeric" for name in each.columns
        }  # fmt: skip
        if self._statistics is not None:
            return {source: from_json(self._statistics[source]) for source in OF_EVENTS}, texts
        fitted: dict[str, list[Fitted]] = {source: [] for source in OF_EVENTS}
        for feature in declared:
            name = list_stored(feature)[0]
            if feature.kind == "numeric":
                numbers = self._sample_numbers(name)
                given = {feature.columns[0]: pa.array(numbers)}
                counts = np.ones(len(numbers), np.int64)
            else:
                known = texts[feature.columns[0]]
                counts = np.zeros(len(known) + 1, np.int64)  # the first: missing
                for (codes,) in read_train_columns(self._file, self._split, (name,)):
                    counts += np.bincount(codes + 1, minlength=len(counts))
                given, counts = {feature.columns[0]: pa.array(known, pa.string())}, counts[1:]
            fitted[feature.source].append(fit_feature(feature, given, counts))
        self._lines += [describe_fitted(each, None) for of in fitted.values() for each in of]
        return {source: stack_rows(of) for source, of in fitted.items()}, texts

    def _sample_numbers(self, name: str) -> NDArray[np.float64]:
        """Training values of a number, evenly spaced if there are many."""
        total = int(self._file.mean_length * self._file.num_samples)
        step = -(-total // _NUMBERS)
        parts = read_train_columns(self._file, self._split, (name,))
        return np.concatenate([np.asarray(values[::step], np.float64) for (values,) in parts])


def _encode_vectors(
    source: AttributeFile, fitted: Fitted, columns: Mapping[str, pa.Array]
) -> NDArray[np.float32]:
    with naming(source.file, fitted.feature):
        vectors = read_vectors(columns[fitted.feature.columns[0]])
    if vectors.shape[1] not in (0, fitted.width):
        raise ValueError(
            f"{source.file}: the vectors of column {fitted.feature.name!r} have "
            f"{vectors.shape[1]} numbers, the model was trained with {fitted.width}"
        )
    return vectors


def _read_texts(histories: Path, column: str) -> list[str]:
    path = find_vocabulary(histories)
    if path is None:
        return []
    table = pq.read_table(path)
    mine = table.filter(pc.equal(table.column("column"), f"category.{column}")).sort_by("id")
    found: list[str] = mine.column("text").to_pylist()
    return found
