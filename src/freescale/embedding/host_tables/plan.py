"""Which rows of a table are in its cache: planned batch by batch, exactly, because the rows that a
batch reads are known before it computes.

A batch brings the rows that it wants and that are not there. Room is made by rows that none of
`PINNED` consecutive batches reads: this one, the one before, which computes, and the one before
that, whose gradients may still be on the way. Of the others those go that were used longest ago;
of equally old ones, those with the smallest row numbers. All of it depends on the numbers of
batches, never on time, so that every schedule makes the same decisions.

`plan_cache` decides and changes nothing; `CacheContents.apply` carries a decision out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

PINNED = 3  # consecutive batches whose rows stay
_LEAST_LOOK = 1024  # entries of the queue that are looked at together

Numbers = NDArray[np.int64]


class CacheTooSmall(ValueError):
    """The rows of `PINNED` consecutive batches have no room in the cache."""

    def __init__(self, need: int, words: str = "") -> None:
        """`need`: how many rows they are; `words`: for the user, who can give more room."""
        super().__init__(words or f"{PINNED} consecutive batches read {need:,} rows")
        self.need = need


@dataclass(frozen=True)
class UsedRows:
    """The rows of one batch, in the queue of those that may go."""

    batch: int
    rows: Numbers  # [n] ascending
    slots: Numbers  # [n]


@dataclass
class CacheContents:
    """What is in the cache, and when it was last used."""

    slot_of: NDArray[np.int32]  # [rows]; -1: not in the cache
    row_of: Numbers  # [slots]; -1: empty
    last_use: Numbers  # [slots] number of the last batch, from 0 on, that wanted the row
    filled: int = 0  # the first slots are filled, once and for all; the others are empty
    # By batch. An entry whose row was used again since, or has gone, counts no more: the row is in
    # the entries of a later batch, if at all.
    queue: deque[UsedRows] = field(default_factory=deque)

    @staticmethod
    def make(rows: int, slots: int) -> CacheContents:
        """An empty cache of `slots` for a table of `rows`."""
        assert slots < 1 << 31
        return CacheContents(
            np.full(rows, -1, dtype=np.int32),
            np.full(slots, -1, dtype=np.int64),
            np.full(slots, -PINNED, dtype=np.int64),  # pinned for no batch
        )

    @property
    def slots(self) -> int:
        return self.row_of.size

    def apply(self, plan: CachePlan) -> None:
        """Carries a decision out. It must be the one about these contents."""
        self.slot_of[plan.leave] = -1
        self.slot_of[plan.bring] = plan.into
        self.row_of[plan.into] = plan.bring
        self.last_use[plan.slots] = plan.batch
        self.filled += plan.bring.size - plan.leave.size
        for _ in range(plan.passed_batches):
            self.queue.popleft()
        if plan.passed_entries:
            first = self.queue.popleft()
            rest = slice(plan.passed_entries, None)
            self.queue.appendleft(UsedRows(first.batch, first.rows[rest], first.slots[rest]))
        self.queue.append(UsedRows(plan.batch, plan.wanted, plan.slots))
        if sum(used.rows.size for used in self.queue) > 2 * self.slots + len(plan.wanted):
            self._drop_old_entries()

    def _drop_old_entries(self) -> None:
        """Afterwards every row of the cache has one entry in the queue."""
        kept: deque[UsedRows] = deque()
        for used in self.queue:
            valid = self._is_last_use(used, slice(None))
            if valid.any():
                kept.append(UsedRows(used.batch, used.rows[valid], used.slots[valid]))
        self.queue = kept

    def _is_last_use(self, used: UsedRows, part: slice) -> NDArray[np.bool_]:
        slots = used.slots[part]
        newest: NDArray[np.bool_] = self.last_use[slots] == used.batch
        newest &= self.row_of[slots] == used.rows[part]
        return newest

    def find_oldest(self, count: int, wanted: Numbers, batch: int) -> _Oldest | None:
        """The `count` rows that were used longest ago, but for the wanted ones and those that are
        pinned when `batch` comes. None if there are not as many."""
        rows: list[Numbers] = []
        passed_batches = passed_entries = 0
        for used in self.queue:
            if not count or used.batch > batch - PINNED:
                break
            at = 0
            while count and at < used.rows.size:
                part = slice(at, at + max(count, _LEAST_LOOK))
                valid = self._is_last_use(used, part) & ~_is_in(used.rows[part], wanted)
                found = valid.nonzero()[0][:count]
                rows.append(used.rows[part][found])
                count -= found.size
                at = at + int(found[-1]) + 1 if not count else min(part.stop, used.rows.size)
            if at < used.rows.size:
                passed_entries = at
                break
            passed_batches += 1
        if count:
            return None
        return _Oldest(np.concatenate([_NONE, *rows]), passed_batches, passed_entries)

    def count_pinned(self, wanted: Numbers, batch: int) -> int:
        """How many rows are pinned when `batch` comes, those that it wants included."""
        pinned = self.row_of[self.last_use > batch - PINNED]
        return wanted.size + int((~_is_in(pinned, wanted)).sum())


@dataclass(frozen=True)
class _Oldest:
    rows: Numbers
    passed_batches: int
    passed_entries: int


@dataclass(frozen=True)
class CachePlan:
    """What a batch changes in the cache."""

    batch: int
    wanted: Numbers  # [u] ascending, as given
    slots: Numbers  # [u] of the wanted rows, from now on
    bring: Numbers  # [m] rows that are not there, ascending
    into: Numbers  # [m] slots for them
    leave: Numbers  # [e] rows that make room: e <= m, and the first e of `into` were theirs
    # of the queue: batches of which nothing is left, entries of the first one after them
    passed_batches: int
    passed_entries: int


_NONE: Numbers = np.zeros(0, dtype=np.int64)


def _is_in(rows: Numbers, wanted: Numbers) -> NDArray[np.bool_]:
    """Which of rows [n] are among the wanted, which are ascending."""
    if not wanted.size:
        return np.zeros(rows.size, dtype=np.bool_)
    place = np.searchsorted(wanted, rows)
    place[place == wanted.size] = 0
    found: NDArray[np.bool_] = wanted[place] == rows
    return found


def plan_cache(contents: CacheContents, wanted: Numbers, batch: int) -> CachePlan:
    """Decides what the next batch brings and what makes room for it.

    Args:
        contents: of the cache; they stay as they are.
        wanted: [u] rows that the batch reads, ascending and unique.
        batch: its number, larger than all before.

    Raises:
        CacheTooSmall: rows that are pinned leave no room.
    """
    slots = contents.slot_of[wanted].astype(np.int64)
    missing = (slots < 0).nonzero()[0]
    bring = wanted[missing]
    empty = min(bring.size, contents.slots - contents.filled)
    oldest = contents.find_oldest(bring.size - empty, wanted, batch)
    if oldest is None:
        raise CacheTooSmall(contents.count_pinned(wanted, batch))
    freed = contents.slot_of[oldest.rows].astype(np.int64)
    into = np.concatenate([freed, np.arange(contents.filled, contents.filled + empty)])
    slots[missing] = into
    return CachePlan(
        batch, wanted, slots, bring, into, oldest.rows, oldest.passed_batches, oldest.passed_entries
    )
