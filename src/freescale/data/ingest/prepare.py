"""Turns interaction files into a histories file, cached by path and content of its sources."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freescale.config import DataConfig, ModelConfig
from freescale.config.columns import parse_labels
from freescale.data.histories import VERSION, VOCABULARY, HistoriesFile, is_histories
from freescale.data.ingest.digest import compute_digest, read_contents
from freescale.data.ingest.history_builder import build_histories
from freescale.data.ingest.ids import Known, ReadDifferently
from freescale.data.ingest.interactions import IDS, Interactions
from freescale.data.ingest.sources import SourceFile, find_files
from freescale.data.workspace import (
    Progress,
    explain_full_disk,
    lock_cache,
    remove_dead_workspaces,
    workspace,
)
from freescale.folders import find_cache_folder
from freescale.stores.path import StorePath, as_path, upload

BUCKET_EVENTS = 2_000_000
_READING = 3  # version of how files are interpreted
_USUAL = (DataConfig.columns, ModelConfig.labels, DataConfig.missing)


def prepare(
    source: str | Path | Sequence[str | Path],
    cache: Path,
    format: str = DataConfig.format,
    num_items: int | None = DataConfig.num_items,
    progress: Progress | None = None,
    *,
    columns: str = DataConfig.columns,
    labels: str = ModelConfig.labels,
    missing: str = DataConfig.missing,
    any_ids: bool = False,
    vocabulary: bool = DataConfig.vocabulary,
    events: Sequence[str] = (),
    known: Known | None = None,
    bucket_events: int = BUCKET_EVENTS,
) -> Path:
    """Makes a histories file of interaction files, or finds it in the cache. Returns its path, or
    `source` itself if it is one. ValueError if a file is missing, damaged or not of the format, or
    an id is out of range; OSError if the disk is full, with the space needed.

    Users with fewer than two events are dropped (and counted in the metadata). Events of equal
    timestamp keep the order of the file; exact duplicates are kept. Integer ids stay as they are.
    Strings, negative integers, and item ids so sparse that a table would be almost unused are
    numbered in order of appearance; `vocabulary.parquet` next to the result maps them.

    `source`, `format`, `columns`, `labels` and `missing` are as of `read_interactions`. `cache` is
    the folder of prepared data, which is found by the paths and all bytes of its sources; for one
    in a store, data is made on a disk and uploaded. `num_items`: rows of the item table; None: the
    largest id plus 1. `progress` is called with a stage ("hash", "read", "sort", "write") and the
    share done. With `any_ids`, for a dynamic item table, item ids that are numbers of 64 bits stay
    as they are and others are hashed (`hash_ids`); `vocabulary` keeps their texts. `events`:
    features of events to keep, as `Interactions` names them. `known`: texts of ids that keep their
    numbers, by column; ids of other columns are integers. `bucket_events`: events in memory at
    once, about.
    """
    shared, report = as_path(cache), progress or (lambda stage, share: None)
    cache = find_cache_folder() if isinstance(shared, StorePath) else shared
    if num_items is not None and num_items < 1:
        raise ValueError(f"num_items is {num_items}; it must be 1 or more")
    files = find_files(source, cache)
    if (ready := find_histories(source, files)) is not None:
        if rules := [label.text for label in parse_labels(labels) if label.operator]:
            raise ValueError(
                f"{files[0]}: a histories file, and labels are made of interactions only: "
                f"{', '.join(rules)}; name a label column, or give the interactions"
            )
        if columns:
            raise ValueError(
                f"{files[0]}: a histories file, whose columns have their names; leave --columns out"
            )
        if known:
            raise ValueError(
                f"{files[0]}: a histories file, whose ids are numbers, and the run knows texts of "
                f"{', '.join(known)}; give the interactions"
            )
        return HistoriesFile(ready, num_items, any_ids).path
    interactions = Interactions(
        files, format, columns, labels, missing, any_ids, vocabulary, events, known
    )
    paths = [file.path for file in files]
    sources = read_contents(paths, cache / "digests", lambda share: report("hash", share))
    made = ",".join(label.text for label in interactions.labels)
    given = [columns, made, missing] if (columns, made, missing) != _USUAL else []
    members = [file.member for file in files if file.member]
    # A run resumes with the same data at any path. The cache key has paths, which errors name.
    about: list[Any] = [[source.digest for source in sources], interactions.formats, num_items]
    about += [*([given] if given else []), *([members] if members else [])]
    about += ["any ids"] if any_ids else []
    about += [["events", *events]] if events else []
    about += [["known", known]] if known is not None else []

    def make_fingerprint() -> str:
        # Earlier versions coded integers in Amazon's format: keep such runs apart.
        usual = set(interactions.formats) == {"amazon"}
        other = [name for name in IDS if (name in interactions.reading.coded) != usual]
        return compute_digest(*about, *([other] if other else []))

    kept = ["no vocabulary"] if any_ids and not vocabulary else []
    resolved = [str(path.resolve()) for path in paths]
    key = compute_digest(VERSION, _READING, *about, *kept, resolved)
    target = cache / key / "histories.parquet"
    remove_dead_workspaces(cache)
    if isinstance(shared, StorePath) and (shared / key / target.name).is_file():
        return shared / key / target.name  # made by another machine
    if target.is_file():
        return _share(target, shared)
    work, fix = f"preparing {files[0]}", "make room, or name a cache folder on another disk"
    # all histories twice, while users are ordered
    with explain_full_disk(cache, work, fix, lambda: 2 * interactions.estimate_bytes()):
        cache.mkdir(parents=True, exist_ok=True)
        with lock_cache(cache), workspace(cache, key) as folder:
            if target.is_file():  # made by another rank meanwhile
                return _share(target, shared)
            written = None
            while written is None:
                try:
                    written = build_histories(
                        interactions, folder, num_items, make_fingerprint, report, bucket_events
                    )
                except ReadDifferently as found:
                    interactions.restart(found.reading)
            for content in sources:
                content.check_unchanged()
            target.parent.mkdir(exist_ok=True)
            for path in written:  # the histories last: if they exist, all is there
                os.replace(path, target.parent / path.name)
    return _share(target, shared)


def _share(made: Path, shared: Path) -> Path:
    """Uploads prepared data if the cache is in a store; the histories last."""
    if not isinstance(shared, StorePath):
        return made
    for path in sorted(made.parent.iterdir(), key=lambda path: path == made):
        upload(path, shared / made.parent.name / path.name)
    return shared / made.parent.name / made.name


def find_histories(
    source: str | Path | Sequence[str | Path], files: Sequence[SourceFile]
) -> Path | None:
    """The path of a source that is histories already: a file, or a folder of files, which are read
    where they are. None: it has interactions."""
    files = [file for file in files if file.path.name != VOCABULARY]
    if not files or not all(file.is_parquet for file in files):
        return None
    if len(files) == 1:
        return files[0].path if is_histories(files[0].path) else None
    if not is_histories(files[0].path):
        return None
    if isinstance(source, str | Path) and as_path(source).is_dir():
        return as_path(source)
    raise ValueError(
        f"{files[0]}: a histories file, one of {len(files)}: give the folder that has them all, "
        "and nothing else"
    )
