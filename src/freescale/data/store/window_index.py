"""The samples of each window of a store, a file per window, in order of time and user.

Windows are made block by block of users: samples are counted, then scattered to their windows in a
file, and each window is sorted. Memory is that of a block and of a window. A window that is over
stays as it is when newer events are appended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.data.durable import replace_file
from freescale.data.ingest.digest import compute_digest
from freescale.data.ranges import split_evenly
from freescale.data.store.event_store import EventStore
from freescale.data.store.samples import FOUND, SAMPLE, SampleRule, find_samples
from freescale.data.workspace import Progress, lock_cache, workspace

_VERSION = 1
_BLOCK = 1 << 22  # events
_MOST_WINDOWS = 100_000
_ABOUT = "windows.json"


class WindowIndex:
    """Finds the samples of windows by their numbers: window w has the times from w * length on.

    Args:
        store: the events.
        rule: how samples are made.
    """

    def __init__(self, store: EventStore, rule: SampleRule) -> None:
        self._store, self._rule = store, rule
        self._known: dict[int, dict[str, int]] = {}  # as in the file, by window
        self.folder = store.folder / f"windows-{compute_digest(_VERSION, asdict(rule))}"

    def prepare(self, low: int, high: int, progress: Progress | None = None) -> None:
        """Makes the windows [low, high) that are not there yet, or may have got more events."""
        if high - low > _MOST_WINDOWS:
            raise ValueError(
                f"{high - low:,} windows of {self._rule.window} between the first and the last "
                f"event: there may be {_MOST_WINDOWS:,}; make them longer (--window)"
            )
        self._known = self._read()
        if not self._list_missing(low, high):
            return
        self.folder.mkdir(exist_ok=True)
        with lock_cache(self._store.folder):
            self._known = self._read()  # another process may have made them
            if missing := self._list_missing(low, high):
                self._make(missing[0], missing[-1] + 1, progress)

    def load(self, number: int) -> NDArray[Any]:
        """[samples] of type SAMPLE of a prepared window."""
        if not self._known[number]["samples"]:
            return np.zeros(0, SAMPLE)
        return np.asarray(np.load(self.folder / _name(number), mmap_mode="r"))

    def forget(self, before: int) -> None:
        """Removes the windows before one. They are made again if they are needed."""
        with lock_cache(self._store.folder):
            known = self._read()
            kept = {number: entry for number, entry in known.items() if number >= before}
            if len(kept) < len(known):
                replace_file(self.folder / _ABOUT, json.dumps(kept).encode())
            for number in known.keys() - kept.keys():
                (self.folder / _name(number)).unlink(missing_ok=True)

    def _read(self) -> dict[int, dict[str, int]]:
        path = self.folder / _ABOUT
        if not path.is_file():
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
        return {int(number): entry for number, entry in found.items()}

    def _list_missing(self, low: int, high: int) -> list[int]:
        known, store, length = self._known, self._store, self._rule.window

        def is_whole(number: int) -> bool:
            entry = known.get(number)
            if entry is None:
                return False
            over = entry["last_time"] >= (number + 1) * length  # events to come are not of it
            return over or entry["events"] == store.num_events

        return [number for number in range(low, high) if not is_whole(number)]

    def _make(self, low: int, high: int, progress: Progress | None) -> None:
        report = progress or (lambda stage, share: None)
        counts = np.zeros(high - low, np.int64)
        for found, share in self._find(low, high):
            counts += np.bincount(found["window"] - low, minlength=high - low)
            report("count windows", share)
        ends = np.cumsum(counts)
        with workspace(self._store.folder, "windows") as work:
            scattered = np.lib.format.open_memmap(
                work / "samples.npy", "w+", FOUND, (int(ends[-1]),)
            )
            cursor = ends - counts
            for found, share in self._find(low, high):
                ordered = found[np.argsort(found["window"], kind="stable")]
                windows = ordered["window"] - low
                own = np.bincount(windows, minlength=high - low)
                behind = np.arange(len(ordered)) - (np.cumsum(own) - own)[windows]
                scattered[cursor[windows] + behind] = ordered
                cursor += own
                report("find windows", share)
            about = {"events": self._store.num_events, "last_time": self._store.last_time}
            for place in range(high - low):
                samples = np.asarray(scattered[ends[place] - counts[place] : ends[place]])
                self._write(work, low + place, samples)
                self._known[low + place] = {"samples": len(samples), **about}
                report("sort windows", (place + 1) / (high - low))
            part = work / _ABOUT
            part.write_text(json.dumps(self._known), encoding="utf-8")
            os.replace(part, self.folder / _ABOUT)

    def _write(self, work: Path, number: int, found: NDArray[Any]) -> None:
        if not len(found):
            return
        order = np.lexsort((found["first"], found["user"], found["time"]))
        samples = np.empty(len(found), SAMPLE)
        for name in SAMPLE.names or ():
            samples[name] = found[name][order]
        np.save(work / _name(number), samples)
        os.replace(work / _name(number), self.folder / _name(number))

    def _find(self, low: int, high: int) -> Iterator[tuple[NDArray[Any], float]]:
        """Samples of the windows [low, high) by blocks of users, and the share done."""
        store, rule, since = self._store, self._rule, low * self._rule.window
        users = store.list_users(since)
        located = store.locate(users)
        # Events before the first window and after the last are not read.
        begin = store.count_before(located, since)
        end = store.count_before(located, high * rule.window)
        for first, last in split_evenly(end - begin, _BLOCK):
            part = slice(first, last)
            events = store.select(located.of(first, last), begin[part], end[part])
            actions = events.read("action") if rule.actions else None
            found = find_samples(
                rule,
                users[part],
                begin[part],
                (end - begin)[part],
                events.read("timestamp", np.int64),
                actions,
                low,
                high,
            )
            yield found, last / len(users)


def _name(number: int) -> str:
    return f"window-{number}.npy"
