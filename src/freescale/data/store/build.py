"""Writes event stores: from a histories file, and with the newer events of another one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.data.durable import replace_file
from freescale.data.histories import HistoriesFile, RowGroup
from freescale.data.ingest.digest import compute_digest
from freescale.data.ranges import split_evenly
from freescale.data.store.event_store import ABOUT, EventStore, locate, select
from freescale.data.store.segment import Segment, SegmentWriter
from freescale.data.workspace import Progress, lock_cache, make_folder, workspace

_VERSION = 1
_MOST_SEGMENTS = 8  # a batch reads from each of them
_MERGED = 1 << 22  # events of a block

Dtypes = Mapping[str, np.dtype[Any]]


def open_store(file: HistoriesFile, cache: Path, progress: Progress | None = None) -> EventStore:
    """The store of a histories file, from the cache or made now, by one process of a machine. It is
    of this file alone: `append_to_store` is for stores of your own (`build_store`)."""
    key = compute_digest(_VERSION, file.fingerprint, *file.file.versions)

    def write(folder: Path) -> None:
        build_store(file, folder, progress)

    return EventStore(make_folder(cache, f"events-{key}", f"events of {file.path}", write))


def build_store(
    histories: HistoriesFile | Path | str, folder: Path | str, progress: Progress | None = None
) -> EventStore:
    """Makes the store of a histories file in a folder, row group by row group. Samples in order of
    time are read from it: `Histories` with a `TimeSpec`. `freescale train` makes its own.

    Raises:
        ValueError: the folder has a store, or the file is no histories file.
    """
    file, folder = _open(histories), Path(folder)
    if (folder / ABOUT).exists():
        raise ValueError(f"{folder} has a store: append to it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    entry = _write_file(file, folder / name_segment(0), None, progress)
    write_about(folder, file.columns, file.fingerprint, [entry])
    return EventStore(folder)


def append_to_store(
    folder: Path | str,
    histories: HistoriesFile | Path | str,
    progress: Progress | None = None,
) -> EventStore:
    """Adds the events of a histories file to a store, none of them earlier than its last one.

    The events that are there stay as they are. When there are many segments, the newest are merged,
    and their sizes at least double from one to the next: each event is copied a few times, however
    many appends there are.

    Raises:
        ValueError: the file has earlier events, or other columns.
    """
    file, folder = _open(histories), Path(folder)
    with lock_cache(folder), workspace(folder, "append") as work:
        store = EventStore(folder)
        remove_unlisted(store)
        if file.columns != store.columns:
            raise ValueError(
                f"{file.path} has the columns {', '.join(file.columns)}, and the store "
                f"{', '.join(store.columns)}: append events with the same columns, or build "
                "another store"
            )
        entries, fingerprint = list(store.entries), file.fingerprint
        number = 1 + max(int(entry["name"].rpartition("-")[2]) for entry in entries)
        entries.append(_write_file(file, work / name_segment(number), store.last_time, progress))
        os.replace(work / name_segment(number), folder / name_segment(number))
        first = plan_merge([entry["events"] for entry in entries])
        if first is not None:
            number += 1
            merged = merge(folder, store.columns, entries[first:], work / name_segment(number))
            os.replace(work / name_segment(number), folder / name_segment(number))
            entries[first:] = [merged]
        digest = compute_digest(store.fingerprint, fingerprint)
        write_about(folder, store.columns, digest, entries)
    return EventStore(folder)


def plan_merge(sizes: Sequence[int]) -> int | None:
    """The first of the last segments that become one, by the sizes of all; None while there are
    few."""
    if len(sizes) <= _MOST_SEGMENTS:
        return None
    first, total = len(sizes) - 1, sizes[-1]
    while first and sizes[first - 1] <= 2 * total:
        first -= 1
        total += sizes[first]
    return min(first, len(sizes) - 2)


def _open(histories: HistoriesFile | Path | str) -> HistoriesFile:
    """Ids may be any: a store keeps them as they are."""
    if isinstance(histories, HistoriesFile):
        return histories
    return HistoriesFile(histories, any_ids=True)


def name_segment(number: int) -> str:
    return f"segment-{number:04}"


def write_about(
    folder: Path,
    columns: Sequence[str],
    fingerprint: str,
    entries: Sequence[Mapping[str, Any]],
    **more: Any,
) -> None:
    """Says which segments the store has; until then it has those of before."""
    about = {
        "version": _VERSION,
        "columns": list(columns),
        "fingerprint": fingerprint,
        "segments": list(entries),
        **more,
    }
    replace_file(folder / ABOUT, json.dumps(about, indent=1).encode())


def remove_unlisted(store: EventStore) -> None:
    """Removes the segments that the last append merged, and those of one that was killed. Until now
    a reader that was open may have needed them."""
    known = {entry["name"] for entry in store.entries}
    for path in store.folder.glob("segment-*"):
        if path.name not in known:
            shutil.rmtree(path)


def _write_file(
    file: HistoriesFile, folder: Path, after: int | None, progress: Progress | None
) -> dict[str, Any]:
    """Writes a segment row group by row group. `after`: no event may be earlier."""
    writer = SegmentWriter(folder, choose_dtypes(file))
    first = last = None
    early = 0
    for number, (users, group) in enumerate(_read_groups(file)):
        times = group.values["timestamp"]
        if len(times):
            low, high = int(times.min()), int(times.max())
            first = low if first is None else min(first, low)
            last = high if last is None else max(last, high)
            if after is not None and low < after:
                early += int((times < after).sum())
        writer.add(users, np.diff(group.offsets), group.values)
        if progress is not None:
            progress("store events", (number + 1) / file.num_groups)
    try:
        events = writer.close()
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None
    if early:
        raise ValueError(
            f"{file.path}: {early:,} events are earlier than the last one of the store, {after}: "
            "append later events alone, or build a store of all of them"
        )
    if first is None:
        raise ValueError(f"{file.path}: no event in any history; give a file with events")
    return {"name": folder.name, "events": events, "first_time": first, "last_time": last}


def _read_groups(file: HistoriesFile) -> Iterator[tuple[NDArray[np.int64], RowGroup]]:
    for number in range(file.num_groups):
        yield file.read_users(number), file.read(number, file.columns)


def choose_dtypes(file: HistoriesFile) -> Dtypes:
    """The smallest type of each column, by the statistics of the file; times have 64 bits, for
    those to come."""
    return {name: np.dtype(_choose_dtype(file, name)) for name in file.columns}


def _choose_dtype(file: HistoriesFile, name: str) -> Any:
    kind = file.find_dtype(name)
    if kind.kind not in "iu" or name == "timestamp":
        return kind
    extremes = [file.read_extremes(group, name) for group in range(file.num_groups)]
    low = min((0 if each is None else each[0] for each in extremes), default=0)
    high = max((1 << 62 if each is None else each[1] for each in extremes), default=0)
    return fit_integers(low, high)


def fit_integers(low: int, high: int) -> Any:
    """The smallest type for integers from `low` to `high`."""
    fitting = (np.int8, np.int16, np.int32, np.int64)
    return next(t for t in fitting if np.iinfo(t).min <= low and high <= np.iinfo(t).max)


def merge(
    folder: Path, columns: Sequence[str], entries: Sequence[Mapping[str, Any]], target: Path
) -> dict[str, Any]:
    """Writes the events of several segments as one, block by block."""
    segments = [Segment(folder / entry["name"]) for entry in entries]
    users = np.unique(np.concatenate([segment.users for segment in segments]))
    located = locate(segments, users)
    lengths = located.lengths
    kinds = {
        name: np.result_type(*(segment.column(name) for segment in segments)) for name in columns
    }
    writer = SegmentWriter(target, kinds)
    for low, high in split_evenly(lengths, _MERGED):
        own = lengths[low:high]
        events = select(segments, located.of(low, high), np.zeros_like(own), own)
        writer.add(users[low:high], own, {name: events.read(name, kinds[name]) for name in columns})
    return {
        "name": target.name,
        "events": writer.close(),
        "first_time": min(entry["first_time"] for entry in entries),
        "last_time": max(entry["last_time"] for entry in entries),
    }
