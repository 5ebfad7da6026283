"""Prepares the features of a run: reads the files of attributes, fits all features to the training
part, and stores them next to the prepared histories."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    count_numbered_items,
    count_train_events,
    count_train_items,
    read_train_columns,
)
from freescale.data.features.attributes import (
    AttributeFile,
    naming,
    number_items,
    number_users,
    read_texts,
    refuse_repeated_ids,
)
from freescale.data.features.crosses import measure_hour, write_parts
from freescale.data.features.fitting import (
    Fitted,
    count_rows,
    describe_fitted,
    fit_feature,
    from_json,
    stack_rows,
    to_json,
)
from freescale.data.features.inference import complete_kinds
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
    LISTED,
    USER_KEYS,
    USERS,
    WEIGHTS,
    FeatureStore,
    encode_parts,
    list_stored,
    name_vectors,
    write_codes,
    write_vectors,
)
from freescale.data.histories import HistoriesFile
from freescale.data.ingest.digest import compute_digest, read_contents
from freescale.data.ingest.hashed_ids import HashedIds
from freescale.data.ingest.ids import VOCABULARY
from freescale.data.workspace import Progress, make_folder

Read = Callable[[Sequence[str]], dict[str, pa.Array]]  # columns of a file of attributes

_VERSION = 4
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
    continued: Path | None = None,
    progress: Progress | None = None,
    values: Sequence[Path] = (),
) -> FeatureStore | None:
    """Makes the features of a run, or finds them in the cache; None without features. One process
    of a machine makes them. ValueError for a value, column or option that is not valid.

    Categories, buckets and popularity are those of the training part of `split`. `any_ids`: items
    are arbitrary ids of a dynamic table. `trained`: the statistics of a run
    (`FeatureStore.copy_statistics`), which count for any data. `continued`: those of the run that
    this one continues, which stay, but for how much the items' own rows count: that follows the
    events, and never falls. `values`: as of `FeatureStore`.
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
        any_ids, *([] if config.follow is None else [config.new_values]),
    )  # fmt: skip
    before = None
    if continued is not None and continued.is_dir():
        before = read_statistics(continued)
        fingerprint = compute_digest(fingerprint, before["fingerprint"])
    known = None if trained is None else read_statistics(trained)
    if known is not None and known["fingerprint"] == fingerprint:
        known = None  # the run's own data: what is in the cache is the same
    if known is None and before is not None:
        known, trained = before, None
    else:
        continued = None
    key = compute_digest(fingerprint, str(histories.resolve()), known and known["fingerprint"])

    def make(folder: Path) -> None:
        given = (config, histories, file, cache, split, sources, request, known, trained)
        _Making(*given, continued).write(folder, fingerprint, report)
        for content in digests:
            content.check_unchanged()

    made = make_folder(cache, f"features-{key}", f"features of {histories}", make)
    return FeatureStore(made, values)


def read_statistics(folder: Path) -> dict[str, Any]:
    """The statistics of a run."""
    found: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    return found


@dataclass
class _Making:
    """Makes the features of a run."""

    _config: DataConfig
    _histories: Path
    _file: HistoriesFile
    _cache: Path
    _split: SplitSpec
    _sources: Sources
    _request: Request
    _statistics: Mapping[str, Any] | None  # statistics of an earlier run; None: fit them
    _trained: Path | None  # folder with these statistics
    _continued: Path | None
    _lines: list[str] = field(default_factory=list)

    def write(self, out: Path, fingerprint: str, report: Progress) -> None:
        items = self._fit_items(out, report)
        users = self._fit_users(out, report)
        report("fit events", 0.0)
        of_events, texts = self._fit_events()
        attributes = self._sources.attributes.get("item")
        file = None if self._sources.follows else self._file
        write_parts(out, of_events["context"], file, attributes, self._item_rows)
        report("fit events", 1.0)
        about = {
            "fingerprint": fingerprint,
            "num_items": self._num_items,
            "any_ids": self._file.any_ids,
            "item": to_json(items),
            "user": to_json(users),
            **{source: to_json(fitted) for source, fitted in of_events.items()},
            "event_texts": dict.fromkeys(texts, ()) if self._sources.follows else texts,
            "hour": (self._statistics or {}).get("hour") or measure_hour(self._file),
            "lines": self._lines,
        }
        (out / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")

    # ---- items

    def _fit_items(self, out: Path, report: Progress) -> list[Fitted]:
        before = 0 if self._continued is None else int((self._statistics or {})["num_items"])
        self._num_items = max(self._file.num_items, before)
        self._item_rows = np.zeros(0, np.int64)
        source = self._sources.attributes.get("item")
        if source is None:
            return []
        declared, read = self._open(source, report)
        values = self._read_ids(source, read)
        ids, count, vocabulary = number_items(source, values, self._file)
        self._num_items = max(self._num_items, count)
        refuse_repeated_ids(source, values, ids)
        del values
        if vocabulary is not None:
            pq.write_table(vocabulary, out / VOCABULARY)
        report("count items", 0.0)
        if self._file.any_ids:
            counts = np.ones(len(ids), np.int64)  # in a stream most items come later
            if not self._sources.follows:
                counts = count_train_items(self._file, self._split, ids)
            rows = np.append(np.argsort(ids), -1)  # the last: any other item
        else:
            events = np.zeros(self._num_items, np.int64)
            events[: self._file.num_items] = count_numbered_items(self._file, self._split)
            counts, known = events[ids], events > 0
            self._write_weights(out, events)
            rows = np.full(self._num_items, -1)
            rows[ids] = np.arange(len(ids))
            np.save(out / LISTED, np.sort(ids))
        report("count items", 1.0)
        self._item_rows = rows
        fitted = self._fit(source, declared, read, counts, out / CODES, rows, report)
        if fitted and self._file.any_ids:
            np.save(out / IDS, ids[rows[:-1]])
        unused = int((counts == 0).sum())
        line = f"{source.file}: {len(ids):,} items by {source.key}"
        line += f", {unused:,} of them without a training event" if unused else ""
        if not self._file.any_ids:
            known[ids] = False
            line += f"; {int(known.sum()):,} items of the training part have no row, which counts "
            line += "as missing"
        self._lines.append(line)
        return fitted

    def _open(self, source: AttributeFile, report: Progress) -> tuple[list[Feature], Read]:
        report(f"read {source.role}s", 0.0)
        listed = find_columns(self._sources, self._request)
        declared = [feature for feature in listed if feature.source == source.role]
        if self._statistics is not None:
            declared = [fitted.feature for fitted in from_json(self._statistics[source.role])]
        names = list(dict.fromkeys(name for each in declared for name in each.columns))
        read = source.open([source.key, *names])
        return declared, read

    def _read_ids(self, source: AttributeFile, read: Read) -> pa.Array:
        keys = read([source.key])[source.key]
        if keys.null_count:
            row = pc.index(keys.is_null(), pa.scalar(True)).as_py()
            raise ValueError(
                f"{source.file}, row {row + 1}: column {source.key!r} is missing; fill or drop the "
                "row"
            )
        return keys

    def _fit(
        self,
        source: AttributeFile,
        declared: Sequence[Feature],
        read: Read,
        counts: NDArray[np.int64],
        target: Path,
        rows: NDArray[np.int64],
        report: Progress,
    ) -> list[Fitted]:
        """Fits the features of a source, one after another, and writes their codes to `target`,
        vectors next to it. counts [n]: how often each row of the file is in the training part.
        `rows`: the row of the file for each row of the target; -1: none."""
        fitted: list[Fitted] = []
        codes, lines, left = [], [], []
        known = from_json(self._statistics[source.role]) if self._statistics is not None else None
        for number, feature in enumerate(declared):
            report(f"fit {source.role}s", number / len(declared))
            columns = read(feature.columns)
            if known is not None:
                one = known[number]
            else:
                chosen, reason = self._choose_kind(source, feature, columns)
                if reason:
                    left.append(f"{feature.name} ({reason})")
                    continue
                with naming(source.file, chosen):
                    one = fit_feature(chosen, columns, np.minimum(counts, 1))
                one = replace(one, first=count_rows(fitted) or 1)
            lines.append(describe_fitted(one, columns))
            codes.append(encode_parts(one, columns))
            if one.width:
                vectors = target.parent / name_vectors(len(fitted))
                with_none = rows if self._file.any_ids else np.append(rows, -1)
                write_vectors(vectors, source, one, columns, with_none)
            fitted.append(one)
            del columns
        report(f"write {source.role}s", 0.0)
        if left:
            self._lines.append(f"columns of the {source.role}s left out: {', '.join(left)}")
        self._lines += lines
        if fitted:
            write_codes(target, fitted, codes, rows)
        report(f"write {source.role}s", 1.0)
        return fitted

    def _fit_users(self, out: Path, report: Progress) -> list[Fitted]:
        source = self._sources.attributes.get("user")
        if source is None:
            return []
        declared, read = self._open(source, report)
        values = self._read_ids(source, read)
        if self._sources.follows:  # by their ids: most of them come later
            ids = np.array(HashedIds(keep=False).encode(values), np.int64)
            refuse_repeated_ids(source, values, ids)
            order = np.argsort(ids)
            np.save(out / USER_KEYS, ids[order])
            self._lines.append(f"{source.file}: {len(ids):,} users by {source.key}")
            rows, counts = np.append(order, -1), np.ones(len(ids), np.int64)
            return self._fit(source, declared, read, counts, out / USERS, rows, report)
        ids = number_users(source, values, self._file)
        refuse_repeated_ids(source, values, ids)
        users = pq.read_table(self._histories, columns=["user_id"]).column("user_id").to_numpy()
        order = np.argsort(ids)
        place = np.searchsorted(ids[order], users).clip(max=len(ids) - 1)
        row = np.where(ids[order][place] == users, order[place], -1)
        trained = (row >= 0) & (count_train_events(self._file, self._split) > 0)
        counts = np.bincount(row[trained], minlength=len(ids))
        fitted = self._fit(source, declared, read, counts, out / USERS, row, report)
        unused, without = len(ids) - len(np.unique(row[row >= 0])), int((row < 0).sum())
        line = f"{source.file}: {len(ids):,} users by {source.key}"
        line += f", {unused:,} of them not in the data" if unused else ""
        line += f"; {without:,} users of the data have no row, which counts as missing"
        self._lines.append(line)
        return fitted

    def _choose_kind(
        self, source: AttributeFile, feature: Feature, columns: Mapping[str, pa.Array]
    ) -> tuple[Feature, str]:
        """The feature with its kind; or why the column is left out."""
        inferred = []
        if feature.kind is None:
            inferred = [source.infer(feature.name, columns[feature.name])]
        if self._request.listed is None:
            return inferred[0].feature, inferred[0].reason
        (chosen,) = complete_kinds([feature], inferred)
        if source.role == "user" and chosen.kind == "vector":
            raise ValueError(
                f"feature user.{chosen.name} is a vector: items have vectors, users have "
                "categories and numbers; leave it out"
            )
        return chosen, ""

    def _write_weights(self, out: Path, events: NDArray[np.int64]) -> None:
        """[items]: how much an item's own row counts. For other data than the run's: as there; in a
        run that continues another one: no less than there."""
        if self._statistics is not None and self._trained is not None:
            copyfile(self._trained / WEIGHTS, out / WEIGHTS)
        else:
            weights = (events / (events + _EVENTS)).astype(np.float32)
            if self._continued is not None and (self._continued / WEIGHTS).is_file():
                before = np.load(self._continued / WEIGHTS)
                np.maximum(weights[: len(before)], before, out=weights[: len(before)])
            np.save(out / WEIGHTS, weights)

    # ---- events

    def _fit_events(self) -> tuple[dict[str, list[Fitted]], dict[str, list[str]]]:
        """The features of events and requests, by source, and the texts of their columns."""
        declared = declare_events(self._config, self._cache)
        texts = {
            name: read_texts(self._histories, f"category.{name}").to_pylist()
            for each in declared if each.kind != "numeric" for name in each.stored_columns
        }  # fmt: skip
        if self._statistics is not None:
            return {source: from_json(self._statistics[source]) for source in OF_EVENTS}, texts
        fitted: dict[str, list[Fitted]] = {source: [] for source in OF_EVENTS}
        for feature in declared:
            name = next(iter(list_stored(feature)), "")
            if feature.is_joined:
                given, counts = {}, np.zeros(0, np.int64)
            elif feature.kind == "numeric":
                numbers = self._sample_numbers(name)
                given = {feature.columns[0]: pa.array(numbers)}
                counts = np.ones(len(numbers), np.int64)
            else:
                known = texts[feature.columns[0]]
                counts = np.zeros(len(known) + 1, np.int64)  # the first: missing
                for (codes,) in read_train_columns(self._file, self._split, (name,)):
                    counts += np.bincount(codes + 1, minlength=len(counts))
                given, counts = {feature.columns[0]: pa.array(known, pa.string())}, counts[1:]
            one = fit_feature(feature, given, counts)
            if self._sources.follows and feature.kind == "categorical" and feature.least == 1:
                one = replace(one, rows=one.rows + self._config.new_values)
            fitted[feature.source].append(one)
        self._lines += [describe_fitted(each, None) for of in fitted.values() for each in of]
        return {source: stack_rows(of) for source, of in fitted.items()}, texts

    def _sample_numbers(self, name: str) -> NDArray[np.float64]:
        """Training values of a number, evenly spaced if there are many."""
        total = int(self._file.mean_length * self._file.num_samples)
        step = -(-total // _NUMBERS)
        parts = read_train_columns(self._file, self._split, (name,))
        return np.concatenate([np.asarray(values[::step], np.float64) for (values,) in parts])
