"""Samples in order of time: the window that an epoch is, and the reader of their events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.data.batches.specs import SampleSpec, SplitSpec, find_dtype
from freescale.data.batches.windows import Events, count_numbered_items, count_train_items
from freescale.data.histories import HistoriesFile
from freescale.data.ranges import list_ranges, split_evenly
from freescale.data.store.event_store import EventStore, Located, Selection
from freescale.data.store.window_index import SampleRule, WindowIndex

SUPERVISED = "supervised"  # column: whether an event is a target of its sample
_AT_ONCE = 1 << 20  # events whose actions are compared at a time: about what a cache holds


@dataclass(frozen=True)
class TimeSpec:
    """Which samples are read in order of time.

    Args:
        store: folder of the event store.
        window: length of a window, in the unit of the times.
        windows: numbers of the windows, each of which is an epoch. Those without a sample are left
            out.
        anchor_actions: for ranking, actions of the events that are candidates; () means all.
        min_history: for ranking, events that a candidate has before it.
        history_pools: for ranking, the actions that share a history; () means no shares.
        follows: whether windows come one after another, of a stream (`Histories.open_window`).
    """

    store: Path
    window: int
    windows: range
    anchor_actions: tuple[int, ...] = ()
    min_history: int = 1
    history_pools: tuple[int, ...] = ()
    follows: bool = False

    def make_rule(self, sample: SampleSpec) -> SampleRule:
        """How events become samples."""
        if sample.task == "ranking":
            return SampleRule(self.window, sample.candidates, self.anchor_actions, self.min_history)
        # Half of a history at most is new: each target keeps as much of the past.
        return SampleRule(self.window, max(1, sample.max_length // 2), by_position=True)

    def check(self, file: HistoriesFile, ranking: bool) -> None:
        """Raises ValueError for options that the file or the task does not have."""
        for option, wanted in (
            ("anchor_actions", self.anchor_actions),
            ("history_pools", self.history_pools),
        ):
            if wanted and not ranking:
                raise ValueError(f"{option} {wanted} is of ranking; leave it out for retrieval")
            if wanted and "action" not in file.columns:
                raise ValueError(
                    f"{file.path}: {option} {wanted} chooses by action, and the file has no column "
                    "'action'; name one when it is prepared, or leave it out"
                )

    def describe(self) -> str:
        """What a run resumes with: which samples, but not where they are stored."""
        some = "all" if self.follows else f"{self.windows.start} to {self.windows.stop}"
        return (
            f"{some} of {self.window}, actions {self.anchor_actions}, min_history "
            f"{self.min_history}, pools {self.history_pools}"
        )


class TimeOrder:
    """The samples of an epoch by their numbers, window after window.

    Attributes:
        windows: [epochs] numbers of the windows that have samples.
        sizes: [epochs] samples of each.
    """

    def __init__(self, index: WindowIndex, spec: TimeSpec, first_of_user: bool) -> None:
        """`first_of_user`: only the first sample of each user in a window."""
        self._index, self._first_of_user = index, first_of_user
        self.load = lru_cache(2)(self._load)
        index.prepare(spec.windows.start, spec.windows.stop)
        sizes = {number: len(self._load(number)) for number in spec.windows}
        self.windows = [number for number, size in sizes.items() if size]
        self.sizes = [sizes[number] for number in self.windows]
        self._starts = np.cumsum([0, *self.sizes])

    def _load(self, number: int) -> NDArray[Any]:
        """[samples] of a window."""
        samples = self._index.load(number)
        if not self._first_of_user:
            return samples
        first = np.unique(samples["user"], return_index=True)[1]
        return samples[np.sort(first)]

    def samples(self, epoch: int, first: int, last: int) -> Tensor:
        """Sample numbers at positions [first, last) of the epoch, counted over all epochs."""
        start = int(self._starts[epoch])
        return torch.arange(start + first, start + last)

    def find(self, epoch: int, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """The samples of an epoch by their numbers."""
        return self.load(self.windows[epoch])[numbers - self._starts[epoch]]  # type: ignore[no-any-return]


class TimeReader:
    """Reads the events of samples from an event store, as `WindowReader` does from a histories
    file. A loop over segments of the store and blocks of events, never over samples.

    Args:
        file: the histories file of the store, for counts of items and rows of users.
        store: the events.
        order: of the samples.
        spec: which events a sample has.
        split: items are counted in its training part: before the first window that is trained.
        sample: what a sample holds.
        columns: that are read.
    """

    def __init__(
        self,
        file: HistoriesFile,
        store: EventStore,
        order: TimeOrder,
        spec: TimeSpec,
        split: SplitSpec,
        sample: SampleSpec,
        columns: Sequence[str],
    ) -> None:
        self._file, self._store, self._order, self._spec = file, store, order, spec
        self._split, self._sample, self._columns = split, sample, tuple(columns)

    def read(self, epoch: int, numbers: NDArray[np.int64]) -> Events:
        """Reads the events of samples `numbers` [n] of an epoch."""
        samples = self._order.find(epoch, numbers)
        located = self._store.locate(samples["user"])
        if self._sample.task == "ranking":
            events, lengths, tails = self._select_candidates(samples, located)
            extra = {}
        else:
            events, lengths, tails, supervised = self._select_targets(samples, located)
            extra = {SUPERVISED: supervised}
        columns = {name: events.read(name, find_dtype(name)) for name in self._columns}
        return columns | extra, lengths, tails

    def _select_targets(
        self, samples: NDArray[Any], located: Located
    ) -> tuple[Selection, NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """The events of samples of retrieval: one target after the other, or in evaluation the
        first one alone, and the history before the last."""
        first = samples["first"].astype(np.int64)
        training = self._split.part == "train"
        end = first + (samples["span"] if training else 1)
        begin = np.maximum(0, end - 1 - self._sample.max_length)
        lengths = end - begin
        supervised = list_ranges(begin, lengths) >= np.repeat(first, lengths)
        events = self._store.select(located, begin, end)
        return events, lengths, np.ones_like(lengths), supervised

    def _select_candidates(
        self, samples: NDArray[Any], located: Located
    ) -> tuple[Selection, NDArray[np.int64], NDArray[np.int64]]:
        """The events of samples of ranking: histories that end before the time of the first
        candidate, and the candidates."""
        first, earlier = samples["first"].astype(np.int64), samples["earlier"].astype(np.int64)
        end, longest = first + samples["span"], self._sample.max_length
        begin = np.zeros_like(end) if self._spec.history_pools else earlier - longest
        begin = np.maximum(0, begin)
        parts, lengths, tails = [], [], []
        for low, high in split_evenly(end - begin, _AT_ONCE):
            some = slice(low, high)
            given = end[some] - begin[some]
            events = self._store.select(located.of(low, high), begin[some], end[some])
            position = list_ranges(begin[some], given)
            past = position < np.repeat(earlier[some], given)
            anchors = position >= np.repeat(first[some], given)
            if self._spec.anchor_actions or self._spec.history_pools:
                actions = events.read("action")
                anchors = self._mark_anchors(anchors, actions)
                past = self._mark_past(past, actions, given)
            parts.append(events.keep(past | anchors))
            lengths.append(_count(past | anchors, given))
            tails.append(_count(anchors, given))
        none = np.zeros(0, np.int64)
        return (
            Selection.concat(parts),
            np.concatenate([none, *lengths]),
            np.concatenate([none, *tails]),
        )

    def _mark_anchors(self, anchors: NDArray[np.bool_], actions: NDArray[Any]) -> NDArray[np.bool_]:
        wanted = self._spec.anchor_actions
        if not wanted:
            return anchors
        places = np.flatnonzero(anchors)  # few of all events
        marked = np.zeros_like(anchors)
        marked[places[np.isin(actions[places], wanted)]] = True
        return marked

    def _mark_past(
        self, past: NDArray[np.bool_], actions: NDArray[Any], lengths: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        pools = self._spec.history_pools
        if not pools:
            return past
        return choose_pools(actions, past, lengths, pools, self._sample.max_length // len(pools))

    # ---- users and items

    def find_rows(self, epoch: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] the row of each sample's user in the histories file; of a stream the user itself."""
        found: NDArray[np.int64] = self._order.find(epoch, numbers)["user"]
        if self._spec.follows:
            return found
        users, order = self._rows
        return order[np.searchsorted(users, found)]

    @cached_property
    def _rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Users, ascending, and the row of each."""
        users = np.concatenate([self._file.read_users(n) for n in range(self._file.num_groups)])
        order = np.argsort(users, kind="stable")
        return users[order], order

    def count_items(self) -> Tensor:
        """[num_items] int64: how often each item occurs before the first window that is trained,
        and once more: any item may come later."""
        return 1 + torch.from_numpy(count_numbered_items(self._file, self._split))

    def count_items_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n]: how often each of ids [n] occurs before the first window that is trained."""
        return count_train_items(self._file, self._split, ids)

    def share_targets(self) -> tuple[NDArray[np.float64], float]:
        """[num_items] probability of each item to be a target, as `count_items` says; no sample is
        without targets."""
        counts = self.count_items().numpy()
        return counts / counts.sum(), 0.0


def _count(mask: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """[samples]: marked events of each."""
    first, last = find_edges(np.flatnonzero(mask), lengths)
    return last - first


def choose_pools(
    actions: NDArray[Any],
    past: NDArray[np.bool_],
    lengths: NDArray[np.int64],
    pools: Sequence[int],
    most: int,
) -> NDArray[np.bool_]:
    """[events]: whether an event is one of the last `most` of its sample with its action.

    Args:
        actions: [events] of samples, in order of time.
        past: [events] whether an event may be read.
        lengths: [samples] events of each sample.
        pools: the actions that are read.
        most: events of each action.
    """
    chosen = np.zeros(len(actions), bool)
    for action in pools:
        found = np.flatnonzero(past & (actions == action))
        first, last = find_edges(found, lengths)
        first = np.maximum(first, last - most)
        chosen[found[list_ranges(first, last - first)]] = True
    return chosen


def find_edges(
    places: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of sorted places [n] in samples of these lengths: where those of each sample begin and end,
    [samples] each."""
    edges = np.searchsorted(places, np.append(0, np.cumsum(lengths)))
    return edges[:-1], edges[1:]
