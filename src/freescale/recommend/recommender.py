"""A trained model that recommends and scores, with the ids of the data, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.config import RunConfig
from freescale.data.batches.windows import list_ranges
from freescale.recommend.catalogue import UNKNOWN, Catalogue
from freescale.recommend.filters import find_offered
from freescale.recommend.inputs import HistoryReader, Past
from freescale.recommend.known_users import KnownUsers
from freescale.recommend.loading import Loaded, load_model
from freescale.recommend.search import ItemSearch

Histories = Any  # lists of events, or a table
Rows = Sequence[Mapping[str, Any]]  # columns of each user or request

_CPU_EVENTS, _GPU_EVENTS = 1 << 14, 1 << 18  # of the histories that are encoded at a time


@dataclass(frozen=True)
class Requests:
    """What recommendations are made from."""

    past: Past
    of_users: Tensor | None = None  # [users, places] rows of their features
    of_requests: Tensor | None = None  # [users, places] rows of the context
    users: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.past)

    @staticmethod
    def concat(parts: Sequence[Requests]) -> Requests:
        """Requests to one model as one, without the users' ids."""
        of_users = [part.of_users for part in parts if part.of_users is not None]
        context = [part.of_requests for part in parts if part.of_requests is not None]
        return Requests(
            Past.concat([part.past for part in parts]),
            torch.cat(of_users) if of_users else None,
            torch.cat(context) if context else None,
        )


@dataclass(frozen=True)
class Recommendations:
    """Items for each user, the best first.

    Attributes:
        users: their ids; None if histories came without.
        items: original ids, at most k for each user.
        scores: of these items; None for a user without a history, who gets popular items.
        unknown: events that were left out, of items that the model does not know.
    """

    users: list[Any] | None
    items: list[list[Any]]
    scores: list[list[float | None]]
    unknown: int = 0

    def __len__(self) -> int:
        return len(self.items)

    def to_table(self) -> pa.Table:
        """A row for each user and item: user, place (from 1), item, score."""
        users = range(len(self)) if self.users is None else self.users
        counts = [len(items) for items in self.items]
        return pa.table(
            {
                "user": pa.array(users).take(pa.array(np.repeat(np.arange(len(self)), counts))),
                "place": pa.array([place for n in counts for place in range(1, n + 1)], pa.int32()),
                "item": pa.array([item for items in self.items for item in items]),
                "score": pa.array([x for scores in self.scores for x in scores], pa.float32()),
            }
        )


def load(
    folder: str | Path,
    device: str | torch.device = "cpu",
    *,
    checkpoint: str | None = None,
    data: str | None = None,
) -> Recommender:
    """Loads a trained model, to recommend and score. One process, no launcher.

    Args:
        folder: of a run, or an export of one. A run needs its data, an export does not.
        device: `cpu` or `cuda`.
        checkpoint: of a run: `last`, `best` or a step. None: the best if the run keeps it.
        data: of a run: where its data is, if it has moved.

    Raises:
        ValueError: the folder holds no trained model, or its data is missing.
    """
    return Recommender(load_model(Path(folder), checkpoint, data), torch.device(device))


class Recommender:
    """Recommends items and scores them. Made by `freescale.load`.

    Histories are a list of events for each user: an item, (item, time), (item, time, action) or a
    mapping by column; or a table with a row per event (Arrow, pandas, Polars), whose columns are
    recognised as those of `--data`. Events are put in order of time. Of a long history the model
    reads the last `max_length` events; events of items that it does not know are left out.

    A user without a history gets the items with the most training events, without scores.

    Not thread-safe.
    """

    def __init__(self, loaded: Loaded, device: torch.device) -> None:
        self.loaded, self.device = loaded, device
        self.module: Any = loaded.module.to(device)
        self.reader = HistoryReader(loaded)

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def items(self) -> Catalogue:
        """The items and their original ids, in the order of `item_vectors`."""
        return self.loaded.catalogue

    @property
    def max_length(self) -> int:
        return self.config.data.max_length

    @cached_property
    def _vectors(self) -> Tensor:
        rows = self.module.item.weight[: len(self.items)]
        with torch.no_grad():
            return self.module.encode_items(rows)  # type: ignore[no-any-return]

    @cached_property
    def search(self) -> ItemSearch:
        """The search among the items, for queries of `encode_requests`."""
        return ItemSearch(self.items, self._vectors)

    def item_vectors(self) -> Tensor:
        """[items, width]: what queries are multiplied with, for a search of your own."""
        self._require("retrieval", "item_vectors")
        return self._vectors

    @cached_property
    def known_users(self) -> KnownUsers:
        """The users of a run's data."""
        return KnownUsers(self.loaded)

    def read(
        self,
        histories: Histories = None,
        *,
        users: Sequence[Any] | None = None,
        attributes: Rows | None = None,
        context: Rows | None = None,
    ) -> Requests:
        """Reads histories, or those of `users` of the run's data; arguments as of `recommend`."""
        if (histories is None) == (users is None):
            raise ValueError("give histories, or users of the run's data")
        if users is not None:
            found = self.known_users.read(self.known_users.find(users))
            past, of_users, of_requests = found
            if context is not None:
                of_requests = self.reader.describe_requests(context, len(past))
            return Requests(past, of_users, of_requests, list(users))
        names = None
        if isinstance(histories, Sequence):
            past = self.reader.read(histories)
        else:
            names, past = self.reader.read_table(histories)
        count = len(past)
        of_users = self.reader.describe_users(attributes, count)
        return Requests(past, of_users, self.reader.describe_requests(context, count), names)

    def encode(self, histories: Histories = None, **given: Any) -> Tensor:
        """[users, width]: the query of each history, zeros without one. Arguments as of
        `recommend`."""
        self._require("retrieval", "encode")
        return self.encode_requests(self.read(histories, **given))

    def recommend(
        self,
        histories: Histories = None,
        k: int = 10,
        *,
        users: Sequence[Any] | None = None,
        exclude_seen: bool = False,
        candidates: Sequence[Any] | None = None,
        attributes: Rows | None = None,
        context: Rows | None = None,
    ) -> Recommendations:
        """Finds the best k of all items for each user, exactly. Among equal scores, the item that
        comes first in the data is first.

        Args:
            histories: of each user.
            k: how many items.
            users: instead of histories: ids of users of the run's data.
            exclude_seen: leave out the items of a user's history, all of it.
            candidates: ids of the items to choose from. None: all.
            attributes: columns of `--users` for each user, if the model reads them.
            context: columns of each request, if the model reads them.

        Raises:
            ValueError: an argument is not valid, or the model is no retrieval model.
        """
        self._require("retrieval", "recommend")
        requests = self.read(histories, users=users, attributes=attributes, context=context)
        offered, _ = find_offered(self.loaded, candidates)
        rows, scores = self.recommend_requests(requests, k, exclude_seen, offered)
        return self.name(requests, rows, scores)

    def name(
        self, requests: Requests, rows: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> Recommendations:
        """Recommendations by original ids from those of `recommend_requests`."""
        counts = (rows >= 0).sum(1)
        named = self.items.restore(rows[rows >= 0])
        values = [None if np.isnan(each) else each for each in scores[rows >= 0].tolist()]
        ends = np.cumsum(counts).tolist()
        starts = [0, *ends[:-1]]
        return Recommendations(
            requests.users,
            [named[a:b] for a, b in zip(starts, ends)],
            [values[a:b] for a, b in zip(starts, ends)],
            requests.past.unknown,
        )

    def recommend_requests(
        self,
        requests: Requests,
        k: int,
        exclude_seen: bool = False,
        candidates: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """As `recommend`: rows of items [users, k], -1 behind the last, and scores [users, k], NaN
        for users without a history."""
        if k < 1:
            raise ValueError(f"k is {k}; it must be 1 or more")
        queries, exclude = self.encode_requests(requests), np.full(len(requests), exclude_seen)
        return self.search.find(queries, requests.past, k, exclude, candidates)

    def encode_requests(self, requests: Requests) -> Tensor:
        """[users, width]: queries, zeros without a history."""
        self._require("retrieval", "encode")
        parts = [
            self.module.encode_queries(self._make_batch(requests, first, last).to(self.device))
            for first, last in self._split(requests.past)
        ]
        width = self.module.encoder.width
        return torch.cat(parts) if parts else torch.zeros(0, width, device=self.device)

    def score(
        self,
        histories: Histories = None,
        candidates: Sequence[Any] = (),
        *,
        users: Sequence[Any] | None = None,
        at: Sequence[Any] | None = None,
        attributes: Rows | None = None,
        context: Rows | None = None,
    ) -> list[NDArray[np.float32]]:
        """Scores candidates of each user: of a retrieval model [candidates], of a ranking model the
        probability of each label [candidates, labels]. NaN for an item that the model does not
        know, and of retrieval for a user without a history.

        Args:
            histories: of each user.
            candidates: ids of items, for all users the same; or a list of them for each.
            users: instead of histories: ids of users of the run's data.
            at: time of each request, for a ranking model with a time bias. None: that of the last
                event.
            attributes: columns of `--users` for each user, if the model reads them.
            context: columns of each request, if the model reads them.
        """
        requests = self.read(histories, users=users, attributes=attributes, context=context)
        of_each = [candidates] * len(requests)
        if len(candidates) and isinstance(candidates[0], list | tuple | np.ndarray):
            if len(candidates) != len(requests):
                raise ValueError(
                    f"candidates are given for {len(candidates)} users, histories for "
                    f"{len(requests)}: give a list of items for each"
                )
            of_each = list(candidates)
        times = None if at is None else self.reader.read_times(list(at), "at")
        found = [self.items.find(items) for items in of_each]
        return self.score_requests(requests, found, times)

    @torch.no_grad()
    def score_requests(
        self,
        requests: Requests,
        candidates: Sequence[NDArray[np.int64]],
        times: NDArray[np.int64] | None = None,
    ) -> list[NDArray[np.float32]]:
        """As `score`, of rows of items."""
        if self.config.model.task == "retrieval":
            queries = self.encode_requests(requests)
            return [
                self.search.score(query, rows, bool(events))
                for query, rows, events in zip(queries, candidates, requests.past.lengths)
            ]
        parts = []
        for first, last in self._split(requests.past, [len(rows) for rows in candidates]):
            batch = self._make_batch(requests, first, last)
            batch = self._add_candidates(batch, requests, candidates, times, first, last)
            parts.append(self.module.predict(batch.to(self.device)).cpu().numpy())
        tasks = len(self.config.label_names)
        values = np.concatenate([np.zeros((0, tasks), np.float32), *parts])
        ends = np.cumsum([len(rows) for rows in candidates])[:-1]
        return [
            np.where(rows[:, None] == UNKNOWN, np.float32(np.nan), part)
            for rows, part in zip(candidates, np.split(values, ends))
        ]

    def _require(self, task: str, what: str) -> None:
        if self.config.model.task != task:
            raise ValueError(
                f"{self.loaded.folder} is a ranking model, which has no {what}: it scores the "
                "candidates that it is given, with `score`"
            )

    def _split(self, past: Past, more: Sequence[int] | None = None) -> Iterator[tuple[int, int]]:
        """Ranges of users whose events, and `more` tokens of each, are encoded at a time."""
        most = _CPU_EVENTS if self.device.type == "cpu" else _GPU_EVENTS
        tokens = np.minimum(past.lengths, self.max_length) + 1
        total = np.cumsum(tokens if more is None else tokens + np.asarray(more, np.int64))
        first, done = 0, 0
        while first < len(past):
            last = max(first + 1, int(np.searchsorted(total, done + most, "right")))
            yield first, last
            first, done = last, int(total[last - 1])

    def _make_batch(self, requests: Requests, first: int, last: int) -> SequenceBatch:
        """The requests [first, last), each with the last events of its history."""
        past = requests.past
        lengths = np.minimum(past.lengths, self.max_length)[first:last]
        index = list_ranges(np.cumsum(past.lengths)[first:last] - lengths, lengths)
        counts = torch.from_numpy(lengths)

        def take(column: NDArray[np.int64]) -> Jagged:
            return Jagged(torch.from_numpy(column[index]), counts)

        sequences = {"history": take(past.items)}
        if past.times is not None:
            sequences["timestamps"] = take(past.times)
        if past.actions is not None:
            sequences["actions"] = take(past.actions)
        if past.features is not None:
            sequences["event_features"] = Jagged(past.features[torch.from_numpy(index)], counts)
        dense = {}
        if requests.of_users is not None:
            dense["user_features"] = requests.of_users[first:last]
        if requests.of_requests is not None:
            dense["context_features"] = requests.of_requests[first:last]
        return SequenceBatch(sequences, dense=dense)

    def _add_candidates(
        self,
        batch: SequenceBatch,
        requests: Requests,
        candidates: Sequence[NDArray[np.int64]],
        times: NDArray[np.int64] | None,
        first: int,
        last: int,
    ) -> SequenceBatch:
        """With candidates of the requests [first, last); unknown ones stand in as item 0."""
        rows = np.concatenate([*candidates[first:last], np.zeros(0, np.int64)])
        counts = torch.tensor([len(each) for each in candidates[first:last]], dtype=torch.int64)
        ones = torch.ones(len(rows), dtype=torch.int64)
        offered = Nested(torch.from_numpy(rows.clip(0)), ones, counts)
        sequences, dense = dict(batch.sequences), dict(batch.dense)
        if times is not None:
            given = torch.from_numpy(times[first:last]).repeat_interleave(counts)
            sequences["candidate_timestamps"] = Jagged(given, counts)
        if "context_features" in dense:
            context = dense.pop("context_features").repeat_interleave(counts, 0)
            sequences["context_features"] = Jagged(context, counts)
        return SequenceBatch(sequences, {"candidates": offered}, dense)
