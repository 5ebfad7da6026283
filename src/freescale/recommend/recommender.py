"""A trained model that recommends and scores, with the ids of the data, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.batch import Jagged
from freescale.config import RunConfig
from freescale.data.catalogue import UNKNOWN, Catalogue
from freescale.data.ranges import list_ranges
from freescale.kernels.best_items import find_best
from freescale.recommend.approximate import ApproximateIndex
from freescale.recommend.filters import find_offered
from freescale.recommend.inputs import HistoryReader
from freescale.recommend.known_users import KnownUsers, open_users
from freescale.recommend.loading import Loaded, load_model
from freescale.recommend.requests import Requests, add_candidates, make_batch, split_requests


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


_MEASURED = 1000  # items whose ten best an index is compared on
Histories = Any  # lists of events, or a table
Rows = Sequence[Mapping[str, Any]]  # columns of each user or request


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


def build_index(recommender: Recommender, least_recall: float = 0.95) -> ApproximateIndex:
    """An index for approximate search without known users: measured on vectors of popular items."""
    vectors, items = recommender.item_vectors(), recommender.items
    popular = torch.from_numpy(items.popular[:_MEASURED])
    return ApproximateIndex.build(
        vectors[torch.from_numpy(items.listed)], vectors[popular], least_recall
    )


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
        self._parts: dict[str, tuple[NDArray[np.int64], Tensor]] = {}  # the last candidates

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def items(self) -> Catalogue:
        """The items and their original ids, in the order of `item_vectors`."""
        return self.loaded.catalogue

    @cached_property
    def index(self) -> ApproximateIndex:
        """The index of an export for approximate search. ValueError without one."""
        return ApproximateIndex.read(self.loaded.folder)

    @property
    def max_length(self) -> int:
        return self.config.data.max_length

    @cached_property
    def _vectors(self) -> Tensor:
        rows = self.module.item.weight[: len(self.items)]
        with torch.no_grad():
            return self.module.encode_items(rows)  # type: ignore[no-any-return]

    def item_vectors(self) -> Tensor:
        """[items, width]: what queries are multiplied with, for a search of your own."""
        self._require("retrieval", "item_vectors")
        return self._vectors

    @cached_property
    def known_users(self) -> KnownUsers:
        """The users of a run's data."""
        return open_users(self.loaded)

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
        approximate: bool = False,
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
            approximate: search the index of an export, which misses some items.
            attributes: columns of `--users` for each user, if the model reads them.
            context: columns of each request, if the model reads them.

        Raises:
            ValueError: an argument is not valid, or the model is no retrieval model.
        """
        self._require("retrieval", "recommend")
        requests = self.read(histories, users=users, attributes=attributes, context=context)
        offered, _ = find_offered(self.loaded, candidates)
        if approximate and offered is not None:
            raise ValueError("candidates are searched exactly: leave approximate out")
        rows, scores = self.recommend_requests(requests, k, exclude_seen, offered, approximate)
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
        exclude_seen: bool | NDArray[np.bool_] = False,
        candidates: NDArray[np.int64] | None = None,
        approximate: bool = False,
        queries: Tensor | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """As `recommend`: rows of items [users, k], -1 behind the last, and scores [users, k], NaN
        for users without a history. `exclude_seen` may differ between users; `queries`: of
        `encode_requests`."""
        if k < 1:
            raise ValueError(f"k is {k}; it must be 1 or more")
        listed = self.items.listed if candidates is None else candidates
        vectors = self._select("last" if candidates is not None else "all", listed)
        k, past = min(k, len(listed)), requests.past
        rows = np.full((len(past), k), -1)
        scores = np.full((len(past), k), np.nan, np.float32)
        queries = self.encode_requests(requests) if queries is None else queries
        starts, counts = past.starts, np.where(exclude_seen, past.lengths, 0)
        some = np.flatnonzero(past.lengths)
        of_some = queries[torch.from_numpy(some).to(self.device)]
        seen = None
        if counts.any():
            items = past.items[list_ranges(starts[some], counts[some])]
            places = np.searchsorted(listed, items).clip(max=len(listed) - 1)
            places = np.where(listed[places] == items, places, -1)
            seen = Jagged(torch.from_numpy(places), torch.from_numpy(counts[some]))
        if approximate:
            values, found = self._search(of_some, k, seen)
        else:
            best, of_best = find_best(of_some, vectors, k, left_out=seen)
            values, found = best.cpu().numpy(), of_best.cpu().numpy()
        rows[some] = np.where(np.isneginf(values), -1, listed[found])
        scores[some] = values
        if len(some) < len(past):
            popular = self.items.popular
            rows[past.lengths == 0] = popular[np.isin(popular, listed)][:k]
        return rows, scores

    def _search(
        self, queries: Tensor, k: int, seen: Jagged | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """As `find_best`, in the index."""
        most = 0 if seen is None else int(seen.lengths.max())
        values, places = self.index.search(queries, min(k + most, len(self.items.listed)))
        values[places < 0] = -np.inf
        if seen is not None:
            for row, left_out in enumerate(torch.split(seen.values, seen.lengths.tolist())):
                values[row, np.isin(places[row], left_out.numpy())] = -np.inf
            order = np.argsort(-values, axis=1, kind="stable")
            values = np.take_along_axis(values, order, 1)
            places = np.take_along_axis(places, order, 1)
        return values[:, :k], places[:, :k]

    def encode_requests(self, requests: Requests) -> Tensor:
        """[users, width]: queries, zeros without a history."""
        self._require("retrieval", "encode")
        parts = [
            self.module.encode_queries(
                make_batch(requests, first, last, self.max_length).to(self.device), last_alone=True
            )
            for first, last in split_requests(requests, self.max_length, self.device)
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
        queries: Tensor | None = None,
    ) -> list[NDArray[np.float32]]:
        """As `score`, of rows of items. `queries`: of `encode_requests`."""
        if self.config.model.task == "retrieval":
            queries, found = self.encode_requests(requests) if queries is None else queries, []
            for query, rows, events in zip(queries, candidates, requests.past.lengths.tolist()):
                known = torch.from_numpy(rows.clip(0, len(self.items) - 1)).to(self.device)
                values = (self._vectors[known] @ query).cpu().numpy()
                unknown = (rows == UNKNOWN) | (rows >= len(self.items)) | (not events)
                found.append(np.where(unknown, np.float32(np.nan), values))
            return found
        parts = []
        counts = [len(rows) for rows in candidates]
        for first, last in split_requests(requests, self.max_length, self.device, counts):
            part = None if times is None else times[first:last]
            batch = make_batch(requests, first, last, self.max_length)
            batch = add_candidates(batch, candidates[first:last], part)
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

    def _select(self, part: str, rows: NDArray[np.int64]) -> Tensor:
        """The vectors of some items. The last choice of each part is kept."""
        if len(rows) == len(self.items):
            return self._vectors
        if part not in self._parts or not np.array_equal(self._parts[part][0], rows):
            self._parts[part] = rows, self._vectors[torch.from_numpy(rows).to(self.device)]
        return self._parts[part][1]
