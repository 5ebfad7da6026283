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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.data.store.segment import Segment
from freescale.data.store.selection import Located, Selection, locate, select

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
