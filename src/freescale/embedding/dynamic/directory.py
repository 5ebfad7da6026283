"""Which ids of a dynamic table have a row on this rank, and where: decided batch by batch.

Every virtual shard decides for itself, from the global batches alone (csrc/dynamic.c):

    1. ids of the batch that have a row use it
    2. `After` removes old rows of the shard whose turn it is
    3. the others, in the order of ids: counted; once admitted, an empty row or that of a victim.
       Ids that are negatives alone neither count nor get a row; that of a learned default row is
       the first, and is admitted at once.

What a batch changes is provisional until its step begins. `plan` returns a `BatchChanges`, by which
`undo` and `redo` exchange the state before the batch for that after it, any number of times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.embedding.dynamic.bindings import (
    CHANGE,
    EVICT,
    FIGURES,
    RulesStruct,
    ShardsStruct,
    address,
    load_dynamic,
)
from freescale.embedding.dynamic_rules import LFU, PINNED, SHARDS, After, Dynamic

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class BatchFigures:
    """Of one batch, on this rank."""

    inserted: int  # ids that got a row
    evicted: int  # rows that went for another id
    swept: int  # rows that went because they were old
    turned_away: int  # admitted ids for which no row could go
    waiting: int  # ids that have not occurred often enough
    forgotten: int  # ids whose count was given up for another one


@dataclass(frozen=True)
class BatchChanges:
    """What a batch has decided."""

    found: Numbers  # [n] entry of each key; -1: none
    inserted: Numbers  # [m] places, among the keys, of ids that got a row
    removed: Numbers  # [r] entries that were swept
    figures: BatchFigures
    log: NDArray[Any]  # of CHANGE: the other state of each entry, in the order of changes


class ShardArrays:
    """Entries of some virtual shards, as arrays that C works on."""

    def __init__(self, shards: int, rows: int) -> None:
        """`rows`: of each shard."""
        buckets, ahead = max(4, -(-rows * 3 // 2)), max(1, rows // 4)
        self.ids = np.zeros(shards * rows, np.int64)
        self.last = np.full(shards * rows, -1, np.int32)  # batch of the last use; -1: empty
        self.count = np.zeros(shards * rows, np.int32)  # batches that used it
        self._map = np.zeros(shards * buckets, np.int32)
        self._queue = np.zeros(shards * ahead, np.int32)
        self._numbers = np.zeros((5, shards), np.int32)
        arrays = (self.ids, self.last, self.count, self._map, *self._numbers[:2], self._queue)
        self.struct = ShardsStruct(
            shards, rows, buckets, ahead, *map(address, (*arrays, *self._numbers[2:]))
        )

    @property
    def used(self) -> int:
        """Entries that hold an id."""
        return int(self._numbers[0].sum(dtype=np.int64))

    @property
    def nbytes(self) -> int:
        held = (self.ids, self.last, self.count, self._map, self._queue, self._numbers)
        return sum(array.nbytes for array in held)


class Directory:
    """The ids of one rank's shards. An entry's number is its row's, among this rank's."""

    def __init__(self, rules: Dynamic, first_shard: int, last_shard: int) -> None:
        """For the shards [first, last). ValueError without a C compiler."""
        self._library = load_dynamic()
        self._rules, self._shards = rules, (first_shard, last_shard)
        count = last_shard - first_shard
        self.rows = ShardArrays(count, rules.shard_rows)
        self.counters = ShardArrays(count, rules.shard_counters) if rules.shard_counters else None
        self.clock = np.zeros(max(1, count), np.int64)  # of each shard: all the same

    @property
    def batches(self) -> int:
        """That were planned, and not undone."""
        return int(self.clock[0])

    @batches.setter
    def batches(self, count: int) -> None:
        self.clock[:] = count

    def plan(self, keys: Numbers, counted: NDArray[np.uint8] | None = None) -> BatchChanges:
        """Decides for the next batch.

        Args:
            keys: [n] of its ids on this rank (layout.py), ascending and unique.
            counted: [n] 0 for those that are negatives alone: they use a row that is there, and
                change nothing else; 2 for those that need no admission, and go first. None: all
                count.
        """
        keys = np.ascontiguousarray(keys)
        n = keys.size
        found, inserted = np.empty(n, np.int64), np.empty(n, np.int64)
        removed = np.empty(self._rules.shard_rows, np.int64)
        log = np.empty(3 * n + removed.size, CHANGE)
        figures = np.zeros(len(FIGURES), np.int64)
        failed = self._library.plan_batch(
            *self._tables, self._describe_rules(), n,
            address(keys), None if counted is None else address(counted),
            *map(address, (found, log, inserted, removed, figures)),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"the decisions about {n:,} ids need more memory than there is")
        self.batches += 1
        *counts, changes = figures.tolist()
        told = BatchFigures(*counts)
        return BatchChanges(
            found,
            inserted[: told.inserted].copy(),
            removed[: told.swept].copy(),
            told,
            log[:changes].copy(),
        )

    def find(self, keys: Numbers) -> Numbers:
        """Entries [n] of keys [n], in any order; -1 for those without a row. Changes nothing."""
        keys = np.ascontiguousarray(keys)
        found = np.empty(keys.size, np.int64)
        self._library.find_batch(
            self.rows.struct, self._shards[0], keys.size, address(keys), address(found)
        )
        return found

    def undo(self, changes: BatchChanges) -> None:
        """Back to the state before the last batch that is not undone."""
        self._exchange(changes, back=True)
        self.batches -= 1

    def redo(self, changes: BatchChanges) -> None:
        """To the state after a batch that was undone."""
        self._exchange(changes, back=False)
        self.batches += 1

    def _exchange(self, changes: BatchChanges, back: bool) -> None:
        log = changes.log
        self._library.exchange(*self._tables, log.size, address(log), back)

    def rebuild(self) -> None:
        """After ids, last uses and counts were written."""
        for table in self._tables:
            if table is not None:
                self._library.rebuild(table)

    @property
    def _tables(self) -> tuple[ShardsStruct, ShardsStruct | None]:
        return self.rows.struct, self.counters.struct if self.counters is not None else None

    def _describe_rules(self) -> RulesStruct:
        evict, (first, last) = self._rules.evict, self._shards
        after, swept = 0, -1
        if isinstance(evict, After):
            after, turn = evict.steps, self.batches % SHARDS
            swept = turn - first if first <= turn < last else -1
        return RulesStruct(
            first_shard=first,
            batch=self.batches,
            admit=self._rules.admit.batches,
            evict=EVICT[evict if isinstance(evict, str) else type(evict).__name__.lower()],
            after=after,
            swept=swept,
            pinned=PINNED,
            halved=evict.halved_every if isinstance(evict, LFU) else 0,
        )
