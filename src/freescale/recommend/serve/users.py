"""The events of users that a server keeps, within a limit of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from threading import Lock

import numpy as np
from torch import Tensor

from freescale.recommend.inputs import Past

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
