"""Reads the events that samples need from a histories file, row group by row group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.data.batches.epoch_order import EpochOrder
from freescale.data.batches.specs import ReadSpec, SplitSpec, find_dtype
from freescale.data.batches.splits import Window, count_new, find_ends, find_later, find_window
from freescale.data.histories import HistoriesFile, RowGroup, make_fingerprint
from freescale.data.ranges import list_ranges
from freescale.data.workspace import make_folder
from freescale.folders import find_cache_folder

# Events by column, one sample after another; [n]: how many each sample has; [n]: how many of these,
# at the end, are beyond the history.
Events = tuple[dict[str, NDArray[Any]], NDArray[Any], NDArray[Any]]


class EventReader(Protocol):
    """Reads the events of samples, and counts items in the train part."""

    def read(self, epoch: int, numbers: NDArray[np.int64]) -> Events:
        """The events of samples `numbers` [n], in the order of `epoch`."""

    def find_rows(self, epoch: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] the row of each sample's user in the histories file."""

    def count_items(self) -> Tensor:
        """[num_items] int64: how often each item occurs."""

    def count_items_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n]: how often each of ids [n] occurs."""

    def share_targets(self) -> tuple[NDArray[np.float64], float]:
        """[num_items] probability of each item to be a target, and the share of samples without
        targets (these add up to 1)."""


class WindowReader:
    """Reads the events of samples and caches row groups. A file that fits in memory is one row
    group: with short histories, a batch reads a little of many groups.

    Args:
        file: The histories.
        order: Of the samples in an epoch.
        split: Which events belong to the part that is read.
        columns: List columns of the file.
        read: How much is shuffled together and kept in memory.
        max_length: Of a history.
        tail: Events beyond the history, at most.
    """

    def __init__(
        self,
        file: HistoriesFile,
        order: EpochOrder,
        split: SplitSpec,
        columns: Sequence[str],
        read: ReadSpec,
        *,
        max_length: int,
        tail: int,
    ) -> None:
        self._file, self._order, self._split = file, order, split
        self._max_length, self._tail = max_length, tail
        # decoded row groups in memory, at most, unless all take no more than these bytes
        self._kept_groups, self._kept_bytes = read.shuffle_groups + 2, read.kept_bytes
        self._columns, self._bytes = tuple(columns), 0
        events = file.mean_length * file.num_samples
        # at most 8 bytes each; of files in a store, the first batch need not wait for all
        fits = 8 * events * len(self._columns) <= read.kept_bytes
        self._whole = fits and not file.file.is_stored
        self._ahead = read.shuffle_groups if read.shuffle else 2
        self._windows: dict[int, Window] = {}  # of all samples of a row group, by its number
        # decoded, the least recently used first
        self.groups: OrderedDict[int, RowGroup] = OrderedDict()

    def read(self, epoch: int, numbers: NDArray[Any]) -> Events:
        """Reads the events of samples `numbers` [n], row groups in the order of `epoch`."""
        if self._whole:
            return self._read_rows(0, numbers)
        starts = self._order.starts.numpy()
        group_of = np.searchsorted(starts, numbers, side="right") - 1
        members = self._list_members(epoch, group_of)
        lengths, tails = np.zeros(len(numbers), np.int64), np.zeros(len(numbers), np.int64)
        pieces: list[dict[str, NDArray[Any]]] = []
        if self._file.file.is_stored and members:
            self._read_ahead(epoch, [group for group, _ in members])
        for group, of in members:
            piece, lengths[of], tails[of] = self._read_rows(group, numbers[of] - starts[group])
            pieces.append(piece)
        offsets = np.cumsum(lengths) - lengths
        columns = {name: np.empty(int(lengths.sum()), find_dtype(name)) for name in self._columns}
        for (_, of), piece in zip(members, pieces, strict=True):
            place = list_ranges(offsets[of], lengths[of])
            for name, column in columns.items():
                column[place] = piece[name]
        return columns, lengths, tails

    def _read_ahead(self, epoch: int, groups: list[int]) -> None:
        """Requests these row groups, and those that are shuffled together after them, also of the
        next epoch."""
        order = [*self._order.groups(epoch).tolist(), *self._order.groups(epoch + 1).tolist()]
        last = order.index(groups[-1]) + 1
        # up to the end of the groups that are shuffled together
        last = min(last + -last % self._ahead, len(order) // 2)
        wanted = dict.fromkeys([*groups, *order[last : last + self._ahead]])
        fresh = [group for group in wanted if group not in self.groups]
        self._file.file.read_ahead(fresh, self._columns)

    def _read_rows(self, group: int, rows: NDArray[Any]) -> Events:
        window = self._find_window(group, rows)
        lengths = window.end - window.begin
        index, values = list_ranges(window.begin, lengths), self._read_group(group).values
        return {name: values[name][index] for name in self._columns}, lengths, window.tail

    def _list_members(self, epoch: int, group_of: NDArray[Any]) -> list[tuple[int, NDArray[Any]]]:
        """Row groups in the epoch's order, so that each is read once, with the samples of each."""
        read_order = self._order.groups(epoch).numpy()
        place = np.empty_like(read_order)
        place[read_order] = np.arange(len(read_order))
        turn = np.argsort(place[group_of], kind="stable")
        sorted_groups = group_of[turn]
        edges = np.flatnonzero(np.diff(sorted_groups, prepend=-1, append=-1))
        pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        return [(int(sorted_groups[first]), turn[first:last]) for first, last in pairs]

    def _find_window(self, number: int, rows: NDArray[Any]) -> Window:
        group = self._read_group(number)
        if number not in self._windows:
            ends = find_ends(self._split, group, self._split.part)
            tails = np.full_like(ends, self._tail)
            if self._split.part == "test":
                later = find_later(self._split, group, self._tail - 1)
                ends, tails = ends + later, later + 1
            elif self._split.since is not None:
                tails = np.minimum(tails, count_new(self._split, group))
            self._windows[number] = find_window(group.offsets[:-1], ends, self._max_length, tails)
        begin, end, tail = self._windows[number]
        return Window(begin[rows], end[rows], tail[rows])

    def _read_group(self, number: int) -> RowGroup:
        if number not in self.groups:
            while len(self.groups) >= self._kept_groups and self._bytes > self._kept_bytes:
                dropped, group = self.groups.popitem(last=False)
                self._windows.pop(dropped, None)
                self._bytes -= _count_bytes(group)
            self.groups[number] = (
                self._read_whole() if self._whole else self._file.read(number, self._columns)
            )
            self._bytes += _count_bytes(self.groups[number])
        self.groups.move_to_end(number)
        return self.groups[number]

    def _read_whole(self) -> RowGroup:
        groups = [self._file.read(each, self._columns) for each in range(self._file.num_groups)]
        counts = [np.diff(group.offsets) for group in groups]
        offsets = np.concatenate([np.zeros(1, np.int64), *counts]).cumsum()
        values = {
            name: np.concatenate([group.values[name].astype(find_dtype(name)) for group in groups])
            for name in self._columns
        }
        return RowGroup(offsets, values)

    def find_rows(self, epoch: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] the row of each sample's user in the histories file: its number."""
        return numbers

    def count_items(self) -> Tensor:
        """[num_items] int64: how often each item occurs in the train part. Reads the whole file."""
        return torch.from_numpy(count_numbered_items(self._file, self._split))

    def count_items_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n]: how often each of ids [n] occurs in the train part. Reads the whole file."""
        return count_train_items(self._file, self._split, ids)

    def share_targets(self) -> tuple[NDArray[np.float64], float]:
        """[num_items] probability of each item to be a target, if samples are equally likely and so
        are the targets of each, and the share of samples without targets (these add up to 1). Reads
        the whole file. Samples that no epoch visits do not count."""
        shares, empty, samples = np.zeros(self._file.num_items), 0, 0
        for number in range(self._file.num_groups):
            group = self._file.read(number, ("item_id", "timestamp"))
            ends = find_ends(self._split, group, "train")
            window = find_window(group.offsets[:-1], ends, self._max_length, 1)
            visited = np.ones(len(ends), bool)
            if self._split.since is not None:
                visited = count_new(self._split, group) > 0
            lengths = np.where(visited, window.end - window.begin - window.tail, 0)
            samples += int(visited.sum())
            index = list_ranges(window.begin + 1, lengths)
            each = np.repeat(1 / np.maximum(lengths, 1), lengths)
            np.add.at(shares, group.values["item_id"][index], each)
            empty += int(np.count_nonzero(visited & (lengths == 0)))
        return shares / max(1, samples), empty / max(1, samples)


def find_new_samples(file: HistoriesFile, split: SplitSpec) -> NDArray[np.int64]:
    """[n]: samples with events to train on after `split.since`, ascending. Row groups that end
    before it are not read."""
    found = [np.zeros(0, np.int64)]
    for number in range(file.num_groups):
        extremes = file.read_extremes(number, "timestamp")
        if extremes is None or split.since is None or extremes[1] > split.since:
            group = file.read(number, ("timestamp",))
            found.append(file.starts[number] + np.flatnonzero(count_new(split, group)))
    return np.concatenate(found)


def find_last_time(file: HistoriesFile, split: SplitSpec) -> int | None:
    """The time of the last event that is trained on; None without any. Reads few row groups: users
    are in order of their last event."""
    last: int | None = None
    for number in reversed(range(file.num_groups)):
        extremes = file.read_extremes(number, "timestamp")
        if extremes is not None and last is not None and extremes[1] <= last:
            continue
        group = file.read(number, ("timestamp",))
        ends = find_ends(split, group, "train")
        times = group.values["timestamp"][ends[ends - group.offsets[:-1] >= 2] - 1]
        if len(times):
            last = int(times.max()) if last is None else max(last, int(times.max()))
    return last


def read_train_columns(
    file: HistoriesFile, split: SplitSpec, columns: Sequence[str]
) -> Iterator[list[NDArray[Any]]]:
    """Columns of the train part's events, of one row group after the other."""
    for number in range(file.num_groups):
        # files in a store: only the needed columns; each batch checks what it reads
        needed = not file.file.is_stored or split.kind in ("time", "windows")
        times = ("timestamp",) if needed else ()
        group = file.read(number, tuple(dict.fromkeys((*columns, *times))))
        lengths = find_ends(split, group, "train") - group.offsets[:-1]
        index = list_ranges(group.offsets[:-1], lengths)
        yield [group.values[name][index] for name in columns]


def count_numbered_items(file: HistoriesFile, split: SplitSpec) -> NDArray[np.int64]:
    """[num_items]: how often each item occurs in the train part. Reads the whole file. Of many
    files, or of files in a store, one process of a machine does, once: the user's cache keeps the
    counts."""

    def count() -> NDArray[np.int64]:
        counts = np.zeros(file.num_items, np.int64)
        for (items,) in read_train_columns(file, split, ("item_id",)):
            np.add.at(counts, items, 1)
        return counts

    def write(folder: Path) -> None:
        np.save(folder / "counts.npy", count())

    if len(file.file.paths) == 1 and not file.file.is_stored:
        return count()
    about = file.file.versions, split.kind, split.time, file.num_items
    cache = find_cache_folder() / "counts"
    made = make_folder(cache, make_fingerprint(*about), f"the counts of {file.path}", write)
    found: NDArray[np.int64] = np.load(made / "counts.npy")
    return found


def count_train_items(
    file: HistoriesFile, split: SplitSpec, ids: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[n]: how often each of the distinct ids [n] occurs in the train part. Reads the whole
    file."""
    order = np.argsort(ids)
    ordered, counts = ids[order], np.zeros(len(ids), np.int64)
    for (items,) in read_train_columns(file, split, ("item_id",)) if len(ids) else ():
        place = np.searchsorted(ordered, items).clip(max=len(ids) - 1)
        place = place[ordered[place] == items]
        np.add.at(counts, place, 1)  # a bincount would need time for all ids in each row group
    found = np.empty_like(counts)
    found[order] = counts
    return found


def count_train_events(file: HistoriesFile, split: SplitSpec) -> NDArray[np.int64]:
    """[samples]: how many events of each are in the train part."""
    counts = []
    for number in range(file.num_groups):
        group = file.read(number, ("timestamp",))
        counts.append(find_ends(split, group, "train") - group.offsets[:-1])
    return np.concatenate(counts)


def _count_bytes(group: RowGroup) -> int:
    return sum(values.nbytes for values in group.values.values())
