"""From checked bodies to queries, and from what the model finds to answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.config import ServeConfig
from freescale.data.catalogue import UNKNOWN
from freescale.embedding.host_tables.tiers import parse_bytes
from freescale.recommend.filters import find_offered
from freescale.recommend.inputs import Past
from freescale.recommend.recommender import Recommender
from freescale.recommend.requests import Requests
from freescale.recommend.serve.bodies import Refused
from freescale.recommend.serve.schema import EVENT

_OVERHEAD = 1000  # bytes of a user apart from its events: objects, the id


@dataclass(frozen=True)
class User:
    past: Past
    features: Tensor | None  # [1, places] rows of the features of the user
    version: int | None = None  # version of the model that these rows of items belong to

    @property
    def nbytes(self) -> int:
        past = self.past
        parts = (past.items, past.times, past.actions, past.features, self.features)
        return _OVERHEAD + sum(part.nbytes for part in parts if part is not None)


class UserCache:
    """The users who were seen last. Safe among threads.

    Args:
        limit: bytes.
        most: events of a user; the latest stay.
    """

    def __init__(self, limit: int, most: int) -> None:
        self._limit, self._most, self._lock = limit, most, Lock()
        self._users: OrderedDict[str, User] = OrderedDict()
        self.nbytes = self.dropped = 0

    def __len__(self) -> int:
        return len(self._users)

    def find(self, id: str) -> User | None:
        with self._lock:
            if id in self._users:
                self._users.move_to_end(id)
            return self._users.get(id)

    def list_ids(self, begin: str, most: int) -> list[str]:
        with self._lock:
            return list(islice((id for id in self._users if id.startswith(begin)), most))

    def add(self, id: str, user: User) -> User:
        """Keeps a user, unless there is one of this id. Returns the one that is kept."""
        with self._lock:
            return self._users.get(id) or self._put(id, user)

    def rebuild(
        self, id: str, user: User, version: int | None, find: Callable[[Past], Past]
    ) -> User:
        """A user as a version has it; kept, if it is later and nothing has come meanwhile."""
        rebuilt = replace(user, past=find(user.past), version=version)
        with self._lock:
            if self._users.get(id) is user and (version or 0) > (user.version or 0):
                self._users[id] = rebuilt
        return rebuilt

    def append(
        self, id: str, events: Past, features: Tensor | None, version: int | None = None
    ) -> User:
        """Appends events to those of a user. `features`: new ones; None: they stay. `version`:
        whose rows of items these are."""
        with self._lock:
            user = self._users.get(id) or User(events.take(np.arange(0)), None, version)
            # rows of two versions are those of none
            version = version if user.version == version else -1
            joined = Past.concat([user.past, events])
            joined = replace(joined, lengths=joined.lengths.sum(keepdims=True), unknown=0)
            if joined.times is not None:  # an event may arrive late
                joined = joined.take(np.argsort(joined.times, kind="stable"))
            features = user.features if features is None else features
            return self._put(id, User(joined, features, version))

    def _put(self, id: str, user: User) -> User:
        index = np.arange(len(user.past.items))[-self._most :]
        user = replace(user, past=user.past.take(index))
        self._drop(id)
        self._users[id] = user
        self.nbytes += user.nbytes
        while self.nbytes > self._limit:
            self._drop(next(iter(self._users)))
            self.dropped += 1
        return user

    def _drop(self, id: str) -> None:
        if id in self._users:
            self.nbytes -= self._users.pop(id).nbytes


Rows = NDArray[np.int64]  # rows of items

_MISREAD = (ValueError, TypeError, OverflowError, pa.ArrowException)  # by odd values
_EVENTS = f"an event is {EVENT['description']}"
_FIXES = {"history": _EVENTS, "events": _EVENTS, "filter": "write FEATURE=VALUE|VALUE"}
_LATEST = 1 << 62  # times: the difference of two is an int64
_SECONDS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclass(frozen=True)
class Query:
    """One request: the best k of the offered items, or scores of the wanted ones."""

    requests: Requests  # one user
    k: int = 10
    exclude_seen: bool = False
    offered: Rows | None = None  # None: all
    wanted: Rows | None = None
    ids: Sequence[Any] = ()  # ids of the wanted rows
    at: Rows | None = None  # [1] time
    describe: bool = False


class Reader:
    """Makes queries and their answers, and keeps the events of users. Safe among threads.

    `version`: of a model that is followed; its readers share a `cache`.
    """

    def __init__(
        self,
        recommender: Recommender,
        config: ServeConfig,
        version: int | None = None,
        cache: UserCache | None = None,
    ) -> None:
        self._recommender, self._loaded = recommender, recommender.loaded
        self._version, kept = version, recommender.max_length + config.keep_events
        self.cache = cache or UserCache(parse_bytes(config.memory), kept)
        self._known = None if self._loaded.histories is None else recommender.known_users
        self._filter = lru_cache(16)(lambda filters: find_offered(self._loaded, None, filters))

    def describe_events(self) -> dict[str, Any]:
        """What the model reads of an event: whether its time, how many units of time are a second
        (0: that is not known), and an action."""
        reader, unit = self._recommender.reader, self._loaded.time_unit
        action = next(iter(reader.actions), None)
        return {
            "times": reader.needs_times,
            "second": _SECONDS.get(unit or "", 0),
            "action": action,
        }

    def must_load(self, requests: Iterable[Mapping[str, Any]]) -> bool:
        """Whether a user's events may have to be read from a file."""
        users = (str(one["user"]) for one in requests if "user" in one)
        return self._known is not None and any(self.cache.find(id) is None for id in users)

    def read_query(self, path: str, one: Mapping[str, Any], place: str) -> Query:
        """Reads a request to /recommend or /score, which is at `place` of the body."""
        requests = self._read_past(one, place)
        shared = {name: one[name] for name in ("k", "exclude_seen", "describe") if name in one}
        ids: Any = one.get("candidates")
        filters = tuple(one.get("filter", ()))
        if path == "/score":
            find, times = self._recommender.items.find, self._recommender.reader.read_times
            at = None
            if "at" in one:
                at = self._try(place, "at", lambda: times([one["at"]], "at"))
                _refuse_far(at, f"{place}at")
            wanted = self._try(place, "candidates", lambda: find(ids))
            return Query(requests, wanted=wanted, ids=ids, at=at, **shared)
        if self._recommender.config.model.task == "ranking":
            message = "a ranking model scores items that it is given"
            raise Refused("path", message, "use /score, with candidates")
        search = lambda: find_offered(self._loaded, ids, filters)  # noqa: E731
        if ids is None:
            search = lambda: self._filter(filters)  # noqa: E731
        offered = self._try(place, "filter" if filters else "candidates", search)[0]
        return Query(requests, offered=offered, **shared)

    def append(self, one: Mapping[str, Any]) -> dict[str, Any]:
        """Appends the events of a body of /events."""
        found = self._read_events(one, one["events"], "events", "")
        self._find_user(one["user"])
        features = found.of_users if "attributes" in one else None
        kept = self.cache.append(str(one["user"]), found.past, features, self._version)
        return self._name_version(
            {"user": one["user"], "events": len(kept.past.items), "unknown": found.past.unknown}
        )

    def _name_version(self, answer: dict[str, Any]) -> dict[str, Any]:
        return answer if self._version is None else answer | {"version": self._version}

    def _read_past(self, one: Mapping[str, Any], place: str) -> Requests:
        if ("user" in one) == ("history" in one):
            message = "both user and history are given" if "user" in one else "user is missing"
            raise Refused(f"{place}user", message, "give user or history")
        if "history" in one:
            return self._read_events(one, one["history"], "history", place)
        user = self._find_user(one["user"])
        if user is None:
            fix = "post events of the user to /events, or give history"
            raise Refused(f"{place}user", "the user has no events here", fix, 404)
        about = self._read_events(one, [], "user", place)
        given = "attributes" in one or user.features is None
        return Requests(user.past, about.of_users if given else user.features, about.of_requests)

    def _read_events(
        self, one: Mapping[str, Any], events: Sequence[Any], field: str, place: str
    ) -> Requests:
        read = self._recommender.read
        more = {name: [one[name]] for name in ("attributes", "context") if name in one}
        found: Requests = self._try(place, field, lambda: read([events], **more))
        _refuse_far(found.past.times, place + field)
        return found

    def _find_user(self, id: Any) -> User | None:
        """A user whose events are kept, or who is in the run's data and is kept from now on."""
        kept = self.cache.find(str(id))
        if kept is not None and kept.version != self._version:
            kept = self.cache.rebuild(str(id), kept, self._version, self._find_rows)
        if kept is not None or self._known is None:
            return kept
        try:
            found = self._recommender.read(users=[id])
        except _MISREAD:
            return None
        return self.cache.add(str(id), User(found.past, found.of_users))

    def _find_rows(self, past: Past) -> Past:
        """The rows of this version's items: those of a dynamic table come and go."""
        if past.keys is None:
            return past
        return replace(past, items=self._recommender.items.find_keys(past.keys))

    def _try(self, place: str, field: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except _MISREAD as error:
            message = str(error).replace("histories[0]", field).replace("--filter ", "")
            fix = _FIXES.get(field, f"check {field}, attributes and context")
            raise Refused(place + field, message[:300], fix) from None

    def answer(self, query: Query, found: Any) -> dict[str, Any]:
        """The answer to a query, from what `compute` found."""
        if query.wanted is None:
            rows, scores = (part[: query.k] for part in found)
            rows = rows[rows >= 0]
            ids: Sequence[Any] = self._recommender.items.restore(rows)
        else:
            rows, ids, scores = query.wanted, query.ids, found
        values: Any = np.where(np.isnan(scores), None, scores)  # JSON has no NaN
        listed = [{"id": id, "score": value} for id, value in zip(ids, values.tolist())]
        if query.describe:
            for one, about in zip(listed, self._describe(rows)):
                one["attributes"] = about
        return self._name_version({"items": listed, "unknown": query.requests.past.unknown})

    def _describe(self, rows: Rows) -> list[dict[str, list[str]]]:
        """The categories of items, by feature."""
        store, items = self._loaded.features, self._recommender.items
        known = (rows != UNKNOWN) & (rows < len(items))
        found: list[dict[str, list[str]]] = [{} for _ in rows]
        if store is not None:
            keys = rows[known] if items.keys is None else items.keys[rows[known]]
            for place, about in zip(np.flatnonzero(known), store.describe_items(keys)):
                found[place] = about
        return found

    def find_items(self, text: str, most: int) -> list[dict[str, Any]]:
        """Items whose id contains a text, the one with the most events first."""
        items = self._recommender.items
        matches = pc.match_substring(items.ids.cast(pa.string()), text, ignore_case=True)
        rows = items.popular
        rows = rows[np.asarray(pc.fill_null(matches, False))[rows]][:most]
        found = zip(items.restore(rows), self._describe(rows))
        return [{"id": id, "attributes": about} for id, about in found]

    def find_users(self, begin: str, most: int) -> list[str]:
        """Ids of users that begin with a text: those that are kept, then others of the run."""
        found = self.cache.list_ids(begin, most)
        known = () if self._known is None else map(str, self._known.samples)
        found += islice((id for id in known if id.startswith(begin)), most)
        return list(dict.fromkeys(found))[:most]


def _refuse_far(times: NDArray[np.int64] | None, field: str) -> None:
    if times is not None and (abs(times.astype(np.float64)) >= _LATEST).any():
        raise Refused(field, "a time has more than 62 bits", "give times of the data")


@torch.no_grad()
def compute(
    recommender: Recommender, queries: Sequence[Query], approximate: bool = False
) -> list[Any]:
    """Answers queries together: (rows, scores) of the best items, or scores of the wanted."""
    groups: dict[object, list[int]] = {}
    found: list[Any] = [None] * len(queries)
    encoded = None
    if recommender.config.model.task == "retrieval":
        encoded = recommender.encode_requests(Requests.concat([one.requests for one in queries]))
    for n, one in enumerate(queries):
        best = one.wanted is None
        groups.setdefault((best, id(one.offered) if best else one.at is None), []).append(n)
    for some in groups.values():
        ones = [queries[n] for n in some]
        requests = Requests.concat([one.requests for one in ones])
        part = None if encoded is None else encoded[some]
        answers: Iterable[Any]
        if ones[0].wanted is None:
            k = max(one.k for one in ones)  # the first of more are the best of fewer
            exclude = np.array([one.exclude_seen for one in ones])
            offered = ones[0].offered
            near = approximate and offered is None
            answers = zip(
                *recommender.recommend_requests(requests, k, exclude, offered, near, queries=part)
            )
        else:
            times = [one.at for one in ones if one.at is not None]
            wanted = [one.wanted for one in ones if one.wanted is not None]
            answers = recommender.score_requests(
                requests, wanted, np.concatenate(times) if times else None, part
            )
        for n, answer in zip(some, answers):
            found[n] = answer
    return found
