"""The samples of each window of a store, a file per window, in order of time and user.

Windows are made block by block of users: samples are counted, then scattered to their windows in a
file, and each window is sorted. Memory is that of a block and of a window. A window that is over
stays as it is when newer events are appended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.data.durable import replace_file
from freescale.data.ingest.digest import compute_digest
from freescale.data.ranges import split_evenly
from freescale.data.store.event_store import EventStore
from freescale.data.workspace import Progress, lock_cache, workspace

# A sample: its user; its first anchor among all events of the user; how many events there are
# from it to the last anchor; how many events are strictly earlier.
SAMPLE = np.dtype([("user", "<i8"), ("first", "<i4"), ("span", "<i4"), ("earlier", "<i4")])
# The same with the window and the time of its first anchor.
FOUND = np.dtype([*SAMPLE.descr, ("window", "<i8"), ("time", "<i8")])


@dataclass(frozen=True)
class SampleRule:
    """How the events of a window become samples.

    Attributes:
        window: length of a window, in the unit of the times. Windows begin at its multiples.
        most: anchors of a sample: consecutive ones of a user in one window.
        actions: of anchors; () means all.
        least: events that an anchor has before it. They are strictly earlier, or with
            `by_position` any that precede it in the history.
        by_position: events of equal time precede each other, as in the history of retrieval.
    """

    window: int
    most: int
    actions: tuple[int, ...] = ()
    least: int = 1
    by_position: bool = False


def find_samples(
    rule: SampleRule,
    users: NDArray[np.int64],
    begin: NDArray[np.int64],
    lengths: NDArray[np.int64],
    times: NDArray[np.int64],
    actions: NDArray[Any] | None,
    low: int,
    high: int,
) -> NDArray[Any]:
    """The samples [n] of type FOUND of some users, one user after another.

    Args:
        rule: how samples are made.
        users: [users] their ids.
        begin: [users] the first of the given events among all of the user's. No earlier one is of
            window `low` or later.
        lengths: [users] how many events are given.
        times: [events] of these.
        actions: [events]; None without actions.
        low: first window.
        high: one past the last window.
    """
    owner = np.repeat(np.arange(len(users)), lengths)
    position = np.arange(len(times)) - np.repeat(np.cumsum(lengths) - lengths - begin, lengths)
    if not len(times):
        return np.zeros(0, FOUND)
    # Of events of equal time, the first one: what is before it is strictly earlier.
    new = np.ones(len(times), bool)
    new[1:] = (np.diff(owner) != 0) | (np.diff(times) != 0)
    earlier = position[np.maximum.accumulate(np.where(new, np.arange(len(times)), 0))]
    windows = times // rule.window
    mask = (windows >= low) & (windows < high)
    mask &= (position if rule.by_position else earlier) >= rule.least
    if rule.actions:
        assert actions is not None
        mask &= np.isin(actions, rule.actions)
    anchors = np.flatnonzero(mask)
    if not len(anchors):
        return np.zeros(0, FOUND)
    # Pieces of at most `most` anchors of one user and window.
    change = (np.diff(owner[anchors]) != 0) | (np.diff(windows[anchors]) != 0)
    group = np.append(True, change)
    place = np.arange(len(anchors))
    place -= np.maximum.accumulate(np.where(group, place, 0))
    heads = np.flatnonzero(place % rule.most == 0)
    first, last = anchors[heads], anchors[np.append(heads[1:], len(anchors)) - 1]
    found = np.empty(len(heads), FOUND)
    found["user"], found["first"] = users[owner[first]], position[first]
    found["span"], found["earlier"] = last - first + 1, earlier[first]
    found["window"], found["time"] = windows[first], times[first]
    return found


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
