"""Which rows of a table are in its cache: planned batch by batch, exactly, because the rows that a
batch reads are known before it computes.

A batch brings the rows that it wants and that are not there. Room is made by rows that none of
`PINNED` consecutive batches reads: this one, the one before, which computes, and the one before
that, whose gradients may be on the way. Of the others those go that were used longest ago, by
batches and then row numbers: every schedule makes the same decisions. `plan_cache` decides, where
the cache is, and changes nothing; `CacheContents.apply` carries a decision out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

PINNED = 3  # consecutive batches whose rows stay
# Entries of the queue that are looked at together: so many for each that is sought, but not fewer
# than these. A device answers one question about many sooner than many about few.
_LOOKS = 4
_LEAST_LOOK = 1024


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
    rows: Tensor  # [n] ascending
    slots: Tensor  # [n]


@dataclass
class CacheContents:
    """What is in the cache, and when it was last used."""

    slot_of: Tensor  # [rows] int32; -1: not in the cache
    row_of: Tensor  # [slots]; -1: empty
    last_use: Tensor  # [slots] number of the last batch, from 0 on, that wanted the row
    filled: int = 0  # the first slots are filled, once and for all; the others are empty
    # By batch. An entry whose row was used again since, or has gone, counts no more: the row is in
    # the entries of a later batch, if at all.
    queue: deque[UsedRows] = field(default_factory=deque)

    @staticmethod
    def make(rows: int, slots: int, device: torch.device | str = "cpu") -> CacheContents:
        """An empty cache of `slots` for a table of `rows`."""
        assert slots < 1 << 31
        return CacheContents(
            torch.full((rows,), -1, dtype=torch.int32, device=device),
            torch.full((slots,), -1, device=device),
            torch.full((slots,), -PINNED, device=device),  # pinned for no batch
        )

    @property
    def slots(self) -> int:
        return self.row_of.numel()

    def apply(self, plan: CachePlan) -> None:
        """Carries a decision out. It must be the one about these contents."""
        self.slot_of.index_fill_(0, plan.leave, -1)
        self.slot_of.index_copy_(0, plan.bring, plan.into.int())
        self.row_of.index_copy_(0, plan.into, plan.bring)
        self.last_use.index_fill_(0, plan.slots, plan.batch)
        self.filled += plan.bring.numel() - plan.leave.numel()
        for _ in range(plan.passed_batches):
            self.queue.popleft()
        if plan.passed_entries:
            first = self.queue.popleft()
            rest = slice(plan.passed_entries, None)
            self.queue.appendleft(UsedRows(first.batch, first.rows[rest], first.slots[rest]))
        if plan.wanted.numel():
            self.queue.append(UsedRows(plan.batch, plan.wanted, plan.slots))
        if sum(used.rows.numel() for used in self.queue) > 2 * self.slots + len(plan.wanted):
            self._drop_old_entries()

    def _drop_old_entries(self) -> None:
        """Afterwards every row of the cache has one entry in the queue."""
        kept: deque[UsedRows] = deque()
        for used in self.queue:
            valid = self._is_last_use(used, slice(None)).nonzero().view(-1)
            if valid.numel():
                kept.append(UsedRows(used.batch, used.rows[valid], used.slots[valid]))
        self.queue = kept

    def _is_last_use(self, used: UsedRows, part: slice) -> Tensor:
        slots = used.slots[part]
        newest = self.last_use.index_select(0, slots) == used.batch
        return newest.logical_and_(self.row_of.index_select(0, slots) == used.rows[part])

    def find_oldest(self, count: int, wanted: Tensor, batch: int) -> _Oldest | None:
        """The `count` rows that were used longest ago, but for the wanted ones and those that are
        pinned when `batch` comes. None if there are not as many."""
        rows: list[Tensor] = [wanted[:0]]
        passed_batches = passed_entries = 0
        for used in self.queue:
            if used.batch > batch - PINNED:
                break
            at = 0
            while count and at < used.rows.numel():
                part = slice(at, at + max(_LOOKS * count, _LEAST_LOOK))
                valid = self._is_last_use(used, part) & ~_is_in(used.rows[part], wanted)
                found = valid.nonzero().view(-1)[:count]
                rows.append(used.rows[part].index_select(0, found))
                count -= found.numel()
                at = at + int(found[-1]) + 1 if not count else min(part.stop, used.rows.numel())
            if at < used.rows.numel():
                passed_entries = at
                break
            passed_batches += 1
        if count:
            return None
        return _Oldest(torch.cat(rows), passed_batches, passed_entries)

    def count_pinned(self, wanted: Tensor, batch: int) -> int:
        """How many rows are pinned when `batch` comes, those that it wants included."""
        pinned = self.row_of[self.last_use > batch - PINNED]
        return wanted.numel() + int((~_is_in(pinned, wanted)).sum())


@dataclass(frozen=True)
class _Oldest:
    rows: Tensor
    passed_batches: int
    passed_entries: int


@dataclass(frozen=True)
class CachePlan:
    """What a batch changes in the cache."""

    batch: int
    wanted: Tensor  # [u] ascending, as given
    slots: Tensor  # [u] of the wanted rows, from now on
    bring: Tensor  # [m] rows that are not there, ascending
    into: Tensor  # [m] slots for them
    leave: Tensor  # [e] rows that make room: e <= m, and the first e of `into` were theirs
    # of the queue: batches of which nothing is left, entries of the first one after them
    passed_batches: int
    passed_entries: int


def _is_in(rows: Tensor, wanted: Tensor) -> Tensor:
    """Which of rows [n] are among the wanted, which are ascending."""
    if not wanted.numel():
        return torch.zeros_like(rows, dtype=torch.bool)
    place = torch.searchsorted(wanted, rows).clamp_(max=wanted.numel() - 1)
    return wanted.index_select(0, place) == rows


def plan_cache(contents: CacheContents, wanted: Tensor, batch: int) -> CachePlan:
    """Decides what the next batch brings and what makes room for it; the contents stay as they are.
    wanted [u] int64: rows that the batch reads, ascending and unique, where the contents are.
    `batch`: its number, larger than all before. CacheTooSmall if pinned rows leave no room."""
    slots = contents.slot_of.index_select(0, wanted).long()
    missing = (slots < 0).nonzero().view(-1)
    bring = wanted.index_select(0, missing)
    empty = min(bring.numel(), contents.slots - contents.filled)
    oldest = contents.find_oldest(bring.numel() - empty, wanted, batch)
    if oldest is None:
        raise CacheTooSmall(contents.count_pinned(wanted, batch))
    freed = contents.slot_of.index_select(0, oldest.rows)
    after = contents.filled + empty
    into = torch.cat([freed, torch.arange(contents.filled, after, device=wanted.device)])
    slots.index_copy_(0, missing, into)
    return CachePlan(
        batch, wanted, slots, bring, into, oldest.rows, oldest.passed_batches, oldest.passed_entries
    )
