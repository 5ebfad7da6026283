"""The users of a run's data and their histories."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.data.batches.specs import find_dtype
from freescale.data.batches.splits import find_ends
from freescale.data.catalogue import read_texts, to_integer
from freescale.data.histories import HistoriesFile, RowGroup
from freescale.data.ingest.hashed_ids import hash_ids
from freescale.data.ranges import list_ranges
from freescale.data.store.event_store import EventStore
from freescale.recommend.inputs import Past, encode
from freescale.recommend.loading import Loaded
from freescale.train.time_order import find_split

Samples = Sequence[int] | NDArray[np.int64]  # places in the histories file


def open_users(loaded: Loaded, before: str | None = None) -> KnownUsers:
    """The users of a run, and arguments as of `KnownUsers`."""
    streamed = isinstance(loaded.histories, EventStore)
    return StreamedUsers(loaded, before) if streamed else KnownUsers(loaded, before)


class KnownUsers:
    """Reads histories of the run's data, a row group at a time.

    Args:
        loaded: a run.
        before: `validation` or `test`: histories end before the target of that part, as
            `freescale eval` sees them. None: they are whole.
    """

    def __init__(self, loaded: Loaded, before: str | None = None) -> None:
        if loaded.histories is None:
            raise ValueError(
                f"{loaded.folder} is an export, which knows no users: give their histories"
            )
        assert isinstance(loaded.histories, HistoriesFile)
        self._loaded, self._file, self._before = loaded, loaded.histories, before
        self._split = find_split(loaded.config, loaded.histories.path, before or "train")

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """[users] their numbers in the histories file, in its order."""
        groups = range(self._file.num_groups)
        return np.concatenate([self._file.read_users(group) for group in groups])

    @cached_property
    def _texts(self) -> dict[int, str] | None:
        found = read_texts(self._loaded.vocabulary, "user_id")
        return None if found is None else dict(zip(found[0].tolist(), found[1].to_pylist()))

    @cached_property
    def samples(self) -> dict[Any, int]:
        """Samples of the file by the original ids of their users."""
        return {user: sample for sample, user in enumerate(self.name(np.arange(len(self))))}

    def __len__(self) -> int:
        return self._file.num_samples

    def name(self, samples: Samples) -> list[Any]:
        """Original ids of samples of the file."""
        numbers: list[int] = self.numbers[np.asarray(samples, np.int64)].tolist()
        texts = self._texts
        return numbers if texts is None else [texts[number] for number in numbers]

    def find(self, users: Sequence[Any]) -> NDArray[np.int64]:
        """Samples of users by their original ids. ValueError for one that the data has not."""
        found = []
        for user in users:
            sample = self.samples.get(user)
            if sample is None:
                other = str(user) if self._texts is not None else to_integer(user)
                sample = self.samples.get(other)
            if sample is None:
                raise ValueError(
                    f"user {user!r} is not in the run's data, with two events or more: give the "
                    "history instead"
                )
            found.append(sample)
        return np.array(found, np.int64)

    def read(self, samples: Samples) -> tuple[Past, Tensor | None, Tensor | None]:
        """Histories of samples [n], the features of their users, and those of the request that
        follows each history (missing ones after a whole history)."""
        samples = np.asarray(samples, np.int64)
        starts, order = self._file.starts, np.argsort(samples, kind="stable")
        group_of = np.searchsorted(starts, samples[order], side="right") - 1
        columns: dict[str, list[NDArray[Any]]] = {name: [] for name in self._columns}
        counts, requests = [], []
        for number in np.unique(group_of).tolist():
            group = self._file.read(number, self._columns)
            rows = samples[order[group_of == number]] - starts[number]
            lengths, index, following = self._find_events(group, rows)
            counts.append(lengths)
            requests.append(self._describe_requests(group, following))
            for name, values in group.values.items():
                columns[name].append(values[index])
        lengths = np.concatenate([np.zeros(0, np.int64), *counts])
        back = np.argsort(order, kind="stable")
        begins = np.cumsum(lengths) - lengths
        events = list_ranges(begins[back], lengths[back])
        found = {
            name: np.concatenate(parts)[events] if parts else np.zeros(0, np.int64)
            for name, parts in columns.items()
        }
        features = self._loaded.features
        of_users = context = None
        if features is not None and features.user_rows:
            of_users = features.find_users(samples)
        if features is not None and features.context_rows:
            context = torch.cat([part for part in requests if part is not None])[
                torch.from_numpy(back)
            ]
        return self._make_past(lengths[back], found), of_users, context

    @property
    def _columns(self) -> tuple[str, ...]:
        features = self._loaded.features
        kept = () if features is None else features.event_columns
        actions = ("action",) if self._has_actions else ()
        return tuple(dict.fromkeys(("item_id", "timestamp", *actions, *kept)))

    @property
    def _has_actions(self) -> bool:
        return self._loaded.module.action is not None

    def _find_events(
        self, group: RowGroup, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Lengths [n] of the histories of rows [n], their events, and the event that follows each;
        -1: none."""
        begin, end = group.offsets[:-1][rows], group.offsets[1:][rows]
        if self._before is None:
            return end - begin, list_ranges(begin, end - begin), np.full(len(rows), -1)
        last = find_ends(self._split, group, self._before)[rows]
        usable = last - begin >= 2  # training and evaluation need as many
        lengths = np.where(usable, last - 1 - begin, 0)
        return lengths, list_ranges(begin, lengths), np.where(usable, last - 1, -1)

    def _describe_requests(self, group: RowGroup, following: NDArray[np.int64]) -> Tensor | None:
        features = self._loaded.features
        if features is None or not features.context_rows:
            return None
        codes = encode(features.context, {}, len(following))
        known = np.flatnonzero(following >= 0)
        values = {name: group.values[name][following[known]] for name in features.event_columns}
        if len(known):
            codes[torch.from_numpy(known)] = features.find_events(values, context=True)
        return codes

    def _make_past(self, lengths: NDArray[np.int64], columns: dict[str, NDArray[Any]]) -> Past:
        loaded, features, items = self._loaded, self._loaded.features, columns["item_id"]
        keys = loaded.catalogue.keys
        if keys is not None:
            items = loaded.catalogue.find_keys(items)
        codes = None
        if features is not None and features.event_rows:
            given = {name: columns[name] for name in features.event_columns}
            codes = features.find_events(given)
        actions, table = None, cast(Any, loaded.module.action)
        if table is not None:  # an action that is new has the last row
            actions = columns["action"].clip(max=table.num_embeddings - 1)
        known = None if keys is None else columns["item_id"]
        return Past(lengths, items, columns["timestamp"], actions, codes, keys=known)


class StreamedUsers(KnownUsers):
    """Users of a run that follows a source, with the events of all windows that are over. Their
    texts are not kept: `name` has hashes, but for users that were named to `find`."""

    def __init__(self, loaded: Loaded, before: str | None = None) -> None:
        if before is not None:
            raise ValueError(f"--before {before} with a run that follows a source: leave it out")
        assert isinstance(loaded.histories, EventStore)
        self._loaded, self._store = loaded, loaded.histories
        self._named: dict[int, Any] = {}
        # here, and not in the first request
        self.numbers = np.unique(np.concatenate([part.users for part in self._store.segments]))

    def __len__(self) -> int:
        return len(self.numbers)

    def find(self, users: Sequence[Any]) -> NDArray[np.int64]:
        ids = hash_ids([str(user) for user in users]).numpy()
        samples = np.searchsorted(self.numbers, ids).clip(max=len(self) - 1)
        if (wrong := np.flatnonzero(self.numbers[samples] != ids)).size:
            raise ValueError(f"user {users[wrong[0]]!r} is in no window: give the history instead")
        self._named |= dict(zip(ids.tolist(), users, strict=True))
        return samples

    def name(self, samples: Samples) -> list[Any]:
        numbers = self.numbers[np.asarray(samples, np.int64)].tolist()
        return [self._named.get(number, number) for number in numbers]

    def read(self, samples: Samples) -> tuple[Past, Tensor | None, Tensor | None]:
        users, loaded = self.numbers[np.asarray(samples, np.int64)], self._loaded
        located = self._store.locate(users)
        events = self._store.select(located, np.zeros_like(located.lengths), located.lengths)
        columns = {name: events.read(name, find_dtype(name)) for name in self._columns}
        features, of_users, context = loaded.features, None, None
        if features is not None and features.user_rows:
            of_users = encode(features.user, {}, len(users))
            if loaded.checkpoint is not None:  # exports describe no users
                of_users = features.find_users(users)
        if features is not None and features.context_rows:
            context = encode(features.context, {}, len(users))
        return self._make_past(located.lengths, columns), of_users, context
