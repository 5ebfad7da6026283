"""From checked bodies to what the model answers, and its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from freescale.recommend.catalogue import UNKNOWN
from freescale.recommend.filters import find_offered
from freescale.recommend.recommender import Recommender
from freescale.recommend.requests import Requests
from freescale.recommend.serve.bodies import Refused, check_times
from freescale.recommend.serve.schema import EVENT, Limits
from freescale.recommend.serve.users import User, UserCache

# What reading values of unexpected types may raise.
_MISREAD = (ValueError, TypeError, OverflowError, pa.ArrowException)
_FIXES = {
    "history": f"an event is {EVENT['description']}",
    "events": f"an event is {EVENT['description']}",
    "filter": "write FEATURE=VALUE or FEATURE=VALUE|VALUE, with features and values of the data",
    "at": "give a time as the data has them",
}

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Query:
    """One request: the best k of the offered items, or scores of the wanted ones."""

    requests: Requests  # of one user
    ids: Sequence[Any] = ()  # that scores are wanted of
    wanted: Rows | None = None  # their rows; None: the best items are wanted
    at: Rows | None = None  # [1] time
    k: int = 0
    exclude_seen: bool = False
    offered: Rows | None = None  # None: all
    describe: bool = False


class Reader:
    """Makes queries. Safe among threads."""

    def __init__(self, recommender: Recommender, limits: Limits) -> None:
        self._recommender, loaded = recommender, recommender.loaded
        self.cache = UserCache(limits.memory, recommender.max_length + limits.kept)
        self._ranking = loaded.config.model.task == "ranking"
        self._known = None if loaded.histories is None else recommender.known_users
        self._filter = lru_cache(16)(lambda filters: find_offered(loaded, None, filters)[0])

    def describe_events(self) -> dict[str, Any]:
        """What the model reads of an event, for the page: whether times, how many of their units
        are a second (0: nobody knows), and one of the actions."""
        reader, unit = self._recommender.reader, self._recommender.loaded.time_unit
        second = 0 if unit is None else {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
        action = next(iter(reader.actions), None)
        return {"times": reader.needs_times, "second": second, "action": action}

    def must_load(self, requests: Iterable[Mapping[str, Any]]) -> bool:
        """Whether a user's events may have to be read from a file."""
        users = (str(one["user"]) for one in requests if "user" in one)
        return self._known is not None and any(self.cache.find(id) is None for id in users)

    def read_query(self, path: str, one: Mapping[str, Any], place: str) -> Query:
        """Reads a body of /recommend or /score, at `place` of the request."""
        requests, describe = self._read_past(one, place), one.get("describe", False)
        if path == "/score":
            ids, at = one["candidates"], None
            if "at" in one:
                reader = self._recommender.reader
                at = self._try(place, "at", lambda: reader.read_times([one["at"]], "at"))
                check_times(at, f"{place}at")
            rows = self._try(place, "candidates", lambda: self._recommender.items.find(ids))
            return Query(requests, ids, rows, at, describe=describe)
        if self._ranking:
            message = "the model is a ranking model, which scores items that it is given"
            raise Refused("path", message, "use /score, with candidates")
        filters, candidates = tuple(one.get("filter", ())), one.get("candidates")
        field, offered = "filter" if filters else "candidates", None
        if candidates is not None:
            loaded = self._recommender.loaded
            offered = self._try(place, field, lambda: find_offered(loaded, candidates, filters))[0]
        elif filters:
            offered = self._try(place, field, lambda: self._filter(filters))
        more = {name: one[name] for name in ("exclude_seen",) if name in one}
        k = one.get("k", 10)
        return Query(requests, k=k, offered=offered, describe=describe, **more)

    def append(self, one: Mapping[str, Any]) -> dict[str, Any]:
        """Appends the events of a body of /events."""
        id, found = str(one["user"]), self._read_history(one, "events", "")
        if self._known is not None:
            self._load(one["user"])
        features = found.of_users if "attributes" in one else None
        kept = self.cache.append(id, found.past, features)
        events, unknown = len(kept.past.items), found.past.unknown
        return {"user": one["user"], "events": events, "unknown": unknown}

    def _read_past(self, one: Mapping[str, Any], place: str) -> Requests:
        if ("user" in one) == ("history" in one):
            message = "both user and history are given" if "user" in one else "user is missing"
            raise Refused(f"{place}user", message, "give user or history")
        if "history" in one:
            return self._read_history(one, "history", place)
        user = self.cache.find(str(one["user"])) or self._load(one["user"])
        if user is None:
            message = f"user {str(one['user'])[:60]!r} has no events here"
            fix = "post them to /events, or give history instead of user"
            raise Refused(f"{place}user", message, fix, 404)
        about = self._read_history({**one, "history": []}, "history", place)
        features = about.of_users if "attributes" in one else user.features
        if features is None:
            features = about.of_users
        return Requests(user.past, features, about.of_requests)

    def _read_history(self, one: Mapping[str, Any], field: str, place: str) -> Requests:
        of_each = {name: [one[name]] for name in ("attributes", "context") if name in one}
        read = self._recommender.read
        found: Requests = self._try(place, field, lambda: read([one[field]], **of_each))
        check_times(found.past.times, place + field)
        return found

    def _load(self, id: Any) -> User | None:
        """Keeps a user of the run's data, if it is one."""
        key = str(id)
        if self._known is None or (kept := self.cache.find(key)) is not None:
            return None if self._known is None else kept
        try:
            found = self._recommender.read(users=[id])
        except _MISREAD:
            return None
        return self.cache.add(key, User(found.past, found.of_users))

    def _try(self, place: str, field: str, read: Any) -> Any:
        try:
            return read()
        except _MISREAD as error:
            message = str(error).replace("histories[0]", field).replace("--filter ", "")
            fix = _FIXES.get(field, f"check {field}")
            raise Refused(place + field, message[:300], fix) from None

    def answer(self, query: Query, found: Any) -> dict[str, Any]:
        """The answer to a query, from what `compute` found."""
        items, unknown = self._recommender.items, query.requests.past.unknown
        if query.wanted is None:
            rows, scores = found
            rows = rows[: query.k][rows[: query.k] >= 0]
            ids, values = items.restore(rows), scores.tolist()
        else:
            rows, ids, values = query.wanted, query.ids, found.tolist()
        listed = [{"id": id, "score": _drop_nan(value)} for id, value in zip(ids, values)]
        if query.describe:
            for one, about in zip(listed, self.describe(rows)):
                one["attributes"] = about
        return {"items": listed, "unknown": unknown}

    def describe(self, rows: Rows) -> list[dict[str, list[str]]]:
        """The categories of items, by feature."""
        store, items = self._recommender.loaded.features, self._recommender.items
        known = (rows != UNKNOWN) & (rows < len(items))
        found: list[dict[str, list[str]]] = [{} for _ in rows]
        if store is not None:
            keys = rows[known] if items.keys is None else items.keys[rows[known]]
            for place, about in zip(np.flatnonzero(known), store.describe_items(keys)):
                found[place] = about
        return found

    def restore(self, rows: Rows) -> list[Any]:
        return self._recommender.items.restore(rows)

    def find_items(self, text: str, most: int) -> Rows:
        """Rows of items whose id contains a text, the one with the most events first."""
        items = self._recommender.items
        ids = items.ids.cast(pa.string())
        matches = np.asarray(pc.fill_null(pc.match_substring(ids, text, ignore_case=True), False))
        popular = items.popular
        return popular[matches[popular]][:most]

    def find_users(self, begin: str, most: int) -> list[str]:
        """Ids of users that begin with a text: of those that are kept, then of the run."""
        found = self.cache.list_ids(begin, most)
        if self._known is not None:
            ids = (str(id) for id in self._known.samples)
            found += islice((id for id in ids if id.startswith(begin)), most)
        return list(dict.fromkeys(found))[:most]


def _drop_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_drop_nan(one) for one in value]
    return None if value != value else value


@torch.no_grad()
def compute(recommender: Recommender, queries: Sequence[Query]) -> list[Any]:
    """Answers queries in one batch: (rows, scores) of the best items, or scores of the wanted."""
    found: list[Any] = [None] * len(queries)
    if recommender.config.model.task == "ranking":
        for timed in (False, True):
            some = [n for n, one in enumerate(queries) if (one.at is not None) == timed]
            if some:
                requests = Requests.concat([queries[n].requests for n in some])
                wanted = [queries[n].wanted for n in some]
                times = np.concatenate([queries[n].at for n in some]) if timed else None
                for n, scores in zip(some, recommender.score_requests(requests, wanted, times)):
                    found[n] = scores
        return found
    requests = Requests.concat([one.requests for one in queries])
    encoded = recommender.encode_requests(requests)
    groups: dict[int, list[int]] = {}
    for n, one in enumerate(queries):
        if one.wanted is None:
            groups.setdefault(id(one.offered), []).append(n)
        else:
            part = encoded[n : n + 1]
            found[n] = recommender.score_requests(one.requests, [one.wanted], queries=part)[0]
    for some in groups.values():
        requests = Requests.concat([queries[n].requests for n in some])
        k = max(queries[n].k for n in some)  # the first of more are the best of fewer
        exclude = np.array([queries[n].exclude_seen for n in some])
        rows, scores = recommender.recommend_requests(
            requests, k, exclude, queries[some[0]].offered, queries=encoded[some]
        )
        for place, n in enumerate(some):
            found[n] = rows[place], scores[place]
    return found
