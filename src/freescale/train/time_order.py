"""Runs in order of time: their windows, the event store, and which part is which."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freescale.config import RunConfig
from freescale.data.batches.specs import SampleSpec, SplitSpec
from freescale.data.batches.time_order import TimeSpec
from freescale.data.histories import HistoriesFile
from freescale.data.ingest.timestamps import guess_unit
from freescale.data.store.build import open_store
from freescale.data.store.event_store import EventStore
from freescale.data.store.window_index import WindowIndex
from freescale.data.stream.stream import STORE, read_state
from freescale.data.workspace import Progress


@dataclass(frozen=True)
class Calendar:
    """Windows by their numbers: window w has the times from w * length on. Windows of a day begin
    at midnight UTC, if times count from 1970 there, and stay as they are when data is added.

    Attributes:
        length: of a window, in the unit of the times.
        origin: the window of the first event.
        first: the first window that is trained. Statistics are of the events before it.
        last: the window of the last event, the test part.
    """

    length: int
    origin: int
    first: int
    last: int

    @property
    def trained(self) -> range:
        return range(self.first, self.last)

    def begin(self, number: int) -> int:
        """The first time of a window."""
        return number * self.length

    def describe(self, number: int) -> dict[str, int]:
        """A window for logs: its place among those of the data, and its times."""
        return {
            "number": number - self.origin,
            "from": self.begin(number),
            "to": self.begin(number + 1),
        }


def plan_calendar(
    first_time: int, last_time: int, length: int, trained: int | None, since: int | None = None
) -> Calendar:
    """Plans the windows of a run.

    Args:
        first_time: of the first event.
        last_time: of the last event.
        length: of a window.
        trained: how many windows are trained, at most: the last ones before that of the test part.
            None: all but the first, which has no events before it.
        since: the last time of a window; only later ones are trained. None: any.

    Raises:
        ValueError: there are not as many, or `since` lies within a window.
    """
    origin, last = first_time // length, last_time // length
    if since is not None:
        return Calendar(length, origin, _find_later(last, length, trained, since), last)
    most = last - origin - 1
    if most < 1 or (trained is not None and trained > most):
        wanted = "" if trained is None else f", and --windows {trained} trains as many"
        raise ValueError(
            f"the data has {last - origin + 1} windows of {length} (in the unit of its times)"
            f"{wanted}: the first has no history and the last is for the test, which leaves "
            f"{max(most, 0)}; give a shorter --window, or fewer --windows"
        )
    return Calendar(length, origin, last - (trained or most), last)


def _find_later(last: int, length: int, trained: int | None, since: int) -> int:
    """The first window that is trained, of those after a time."""
    first = (since + 1) // length
    if (since + 1) % length:
        raise ValueError(
            f"{since}, after which windows are trained, lies within the window from "
            f"{first * length} to {(first + 1) * length}: give the end of a window, "
            f"--since {first * length - 1} or --since {(first + 1) * length - 1}"
        )
    if first >= last:
        raise ValueError(
            f"no window of {length} (in the unit of the times) is complete after {since}: the "
            "last one of the data is for the test; give newer data"
        )
    return first if trained is None else max(first, last - trained)


def open_file(config: RunConfig, path: Path) -> HistoriesFile:
    """The histories file of a run."""
    return HistoriesFile(path, config.data.num_items, "item" in config.dynamic_tables)


def find_calendar(config: RunConfig, file: HistoriesFile) -> Calendar:
    """The windows of a run with --order time."""
    first, last = file.find_times()
    length = config.data.window_length.convert(guess_unit(last))
    since = None if config.origin is None else config.origin.since
    return plan_calendar(first, last, length, config.data.windows, since)


def find_split(config: RunConfig, path: Path, part: str = "train", fits: bool = False) -> SplitSpec:
    """The split of a run's histories.

    Args:
        config: the settings of the run.
        path: the histories file.
        part: `train`, `validation` or `test`.
        fits: in order of time, the training part ends before the first window that is trained, as
            it does for statistics; else before the test window.
    """
    data = config.data
    if data.order != "time":
        return SplitSpec(data.split, data.split_time, part)
    if data.follow is not None:  # the file has the events of the first window
        return SplitSpec("windows", open_file(config, path).find_times()[1] + 1, part)
    if part == "validation":
        refuse_validation()
    calendar = find_calendar(config, open_file(config, path))
    time = calendar.begin(calendar.first if fits else calendar.last)
    return SplitSpec("windows", time, part)


def refuse_validation() -> None:
    raise ValueError(
        "a run in order of time has no validation part: each window was evaluated before it was "
        "trained (metrics.jsonl); take the part test"
    )


def prepare_windows(
    config: RunConfig, path: Path, cache: Path, progress: Progress | None = None
) -> EventStore:
    """Makes the event store of a run and the samples of its windows, or finds them in the cache.
    One process of a machine makes them."""
    file = open_file(config, path)
    calendar, store = find_calendar(config, file), open_store(file, cache, progress)
    trained = _make_spec(config, store, calendar.length, calendar.trained)
    rule = trained.make_rule(_make_sample(config))
    WindowIndex(store, rule).prepare(calendar.first, calendar.last + 1, progress)
    return store


def find_windows(
    config: RunConfig, path: Path, cache: Path, part: str, window: int | None
) -> dict[str, Any]:
    """The specs of `Histories` in order of time, as keywords: those of the windows that are
    trained, of the test window, or of one window that is evaluated."""
    if config.data.follow is not None:
        return _find_followed(config, path, part, window)
    calendar = find_calendar(config, open_file(config, path))
    store = prepare_windows(config, path, cache)
    if part == "train":
        windows, time = calendar.trained, calendar.begin(calendar.first)
    else:
        if window is None and part == "validation":
            refuse_validation()
        number = calendar.last if window is None else window
        windows, time = range(number, number + 1), calendar.begin(number)
    spec = _make_spec(config, store, calendar.length, windows)
    return {"split": SplitSpec("windows", time, part), "time": spec}


def _find_followed(config: RunConfig, path: Path, part: str, window: int | None) -> dict[str, Any]:
    """As `find_windows`, of a stream: its first window or, to evaluate it, a given one."""
    store = EventStore(path.parent.parent / STORE)
    length = config.data.window_length.convert(read_state(path.parent.parent)["unit"])
    number = store.first_time // length if window is None else window
    spec = _make_spec(config, store, length, range(number, number + 1))
    return {"split": SplitSpec("windows", number * length, part), "time": spec}


def _make_spec(config: RunConfig, store: EventStore, length: int, windows: range) -> TimeSpec:
    data = config.data
    return TimeSpec(
        store.folder,
        length,
        windows,
        data.candidate_actions,
        data.min_history,
        data.history_pool_actions,
        data.follow is not None,
    )


def _make_sample(config: RunConfig) -> SampleSpec:
    data = config.data
    return SampleSpec(config.model.task, config.label_names, data.max_length, data.candidates)
