"""The event store: an append-only log of the events of each user, for random access.

Epochs of users read a histories file from one end to the other, a row group at a time, and need no
more. Samples in order of time need a few events of many users in each batch: of a row group, they
would decode thousands of histories to read one. Hence the store, a second copy of the events that
is mapped into memory and read at any place.

    store.json      columns, segments, times; written last, so that a store is whole or absent
    segment-N/      of events; later segments have later events
    windows-KEY/    samples of each window of time (`window_index`)

A user's history is that of all segments, one after another. Event p of a user stays event p when
newer ones are appended and when segments are merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from freescale.data.ranges import list_ranges
from freescale.data.store.segment import Segment


class Located(NamedTuple):
    """Where the events of users [n] are, each [segments, n]."""

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] events of each user, in all segments."""
        return np.asarray(self.counts.sum(0), np.int64)

    def of(self, low: int, high: int) -> Located:
        """Of some of the users."""
        return Located(self.starts[:, low:high], self.counts[:, low:high])


def locate(segments: Sequence[Segment], users: NDArray[np.int64]) -> Located:
    """Finds users [n], as often as they occur."""
    found = [segment.locate(users) for segment in segments]
    starts, counts = zip(*found, strict=True)
    return Located(np.stack(starts), np.stack(counts))


@dataclass(frozen=True)
class _Part:
    """Some events of one segment, and their places among all events of the selection."""

    segment: Segment
    index: NDArray[np.int64]
    place: NDArray[np.int64] | slice


@dataclass(frozen=True)
class Selection:
    """Events of a store, one user after another."""

    parts: tuple[_Part, ...]
    total: int

    def read(self, name: str, dtype: DTypeLike | None = None) -> NDArray[Any]:
        """[total] values of a column. `dtype`: by default one that all segments fit."""
        columns = [part.segment.column(name) for part in self.parts]
        if dtype is None:
            dtype = np.result_type(*columns) if columns else np.int64
        values = np.empty(self.total, dtype)
        for part, column in zip(self.parts, columns, strict=True):
            values[part.place] = column[part.index]
        return values

    def keep(self, mask: NDArray[np.bool_]) -> Selection:
        """The events of a mask [total], in the same order."""
        total = int(np.count_nonzero(mask))
        if len(self.parts) == 1:
            (part,) = self.parts
            return Selection((_Part(part.segment, part.index[mask], slice(0, total)),), total)
        places, parts = np.cumsum(mask), []
        for part in self.parts:
            kept = mask[part.place]
            parts.append(_Part(part.segment, part.index[kept], places[part.place][kept] - 1))
        return Selection(tuple(parts), total)

    @staticmethod
    def concat(selections: Iterable[Selection]) -> Selection:
        """The events of several, one selection after another."""
        parts, total = [], 0
        for each in selections:
            for part in each.parts:
                place = part.place
                moved = (
                    slice(place.start + total, place.stop + total)
                    if isinstance(place, slice)
                    else place + total
                )
                parts.append(_Part(part.segment, part.index, moved))
            total += each.total
        return Selection(tuple(parts), total)


def select(
    segments: Sequence[Segment],
    located: Located,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
) -> Selection:
    """The events [begin, end) of users [n], counted over all segments: [sum(end - begin)]. A loop
    over segments, whatever the number of users."""
    lengths = end - begin
    offsets, before = np.cumsum(lengths) - lengths, np.zeros_like(begin)
    parts, total = [], int(lengths.sum())
    for segment, starts, counts in zip(segments, *located, strict=True):
        low, high = np.clip(begin - before, 0, counts), np.clip(end - before, 0, counts)
        here = high - low
        if (count := int(here.sum())) == total:
            place: NDArray[np.int64] | slice = slice(0, total)
        else:
            place = list_ranges(offsets + before + low - begin, here)
        if count:
            parts.append(_Part(segment, list_ranges(starts + low, here), place))
        before = before + counts
    return Selection(tuple(parts), total)


ABOUT = "store.json"


class EventStore:
    """Reads a store. `build_store` and `append_to_store` write it.

    Attributes:
        columns: of the events.
        num_events: of all users.
        first_time: of the first event.
        last_time: of the last event.
        fingerprint: of all events.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        about: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        self.columns: tuple[str, ...] = tuple(about["columns"])
        self.fingerprint: str = about["fingerprint"]
        self.entries: list[dict[str, Any]] = about["segments"]
        self.segments = [Segment(folder / entry["name"]) for entry in self.entries]
        self.num_events = sum(int(entry["events"]) for entry in self.entries)
        self.first_time = min(int(entry["first_time"]) for entry in self.entries)
        self.last_time = max(int(entry["last_time"]) for entry in self.entries)

    def list_users(self, since: int) -> NDArray[np.int64]:
        """Ids of the users with an event at or after a time, about in the order in which their
        events lie."""
        found = np.zeros(0, np.int64)
        for segment, entry in zip(self.segments, self.entries, strict=True):
            if entry["last_time"] >= since:
                late = np.flatnonzero(segment.lasts >= since)
                users = segment.users[late[np.argsort(segment.starts[late], kind="stable")]]
                found = np.concatenate([found, users[~np.isin(users, found)]])
        return found

    def locate(self, users: NDArray[np.int64]) -> Located:
        """Finds users [n], as often as they occur."""
        return locate(self.segments, users)

    def select(
        self, located: Located, begin: NDArray[np.int64], end: NDArray[np.int64]
    ) -> Selection:
        """The events [begin, end) of each user."""
        return select(self.segments, located, begin, end)

    def count_before(self, located: Located, time: int) -> NDArray[np.int64]:
        """[n]: events of each user before a time."""
        total = np.zeros(located.starts.shape[1], np.int64)
        for segment, entry, starts, counts in zip(
            self.segments, self.entries, *located, strict=True
        ):
            if entry["last_time"] < time:
                total += counts
            elif entry["first_time"] < time:
                total += segment.count_before(starts, counts, time)
        return total


def open_growing(folder: Path, tries: int = 10) -> EventStore:
    """Opens a store whose segments another process merges. All files are mapped: they may go."""
    try:
        store = EventStore(folder)
        _ = [segment.column(name) for segment in store.segments for name in store.columns]
    except FileNotFoundError:
        if not tries:
            raise
        return open_growing(folder, tries - 1)
    return store
