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

import ctypes
from ctypes import POINTER, Structure, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.compiled import compile_and_load, declare
from freescale.embedding.dynamic_rules import LFU, PINNED, After, Dynamic
from freescale.kernels.upload import upload

SOURCE = Path(__file__).with_name("csrc") / "dynamic.c"

# `Change` of dynamic.c
CHANGE = np.dtype(
    [("table", "<i8"), ("entry", "<i8"), ("id", "<i8"), ("last", "<i4"), ("count", "<i4")]
)
FIGURES = ("inserted", "evicted", "swept", "turned_away", "waiting", "forgotten", "changes")
EVICT = {"lru": 0, "lfu": 1, "after": 2}  # `Evict` of dynamic.c


class ShardsStruct(Structure):
    """`Shards` of shards.h."""

    _fields_ = [
        *((name, c_int64) for name in ("shards", "rows", "buckets", "ahead", "bits")),
        *((name, c_void_p) for name in ("ids", "last", "count", "map", "used", "low")),
        *((name, c_void_p) for name in ("queue", "queue_at", "queue_end", "bound")),
    ]


class RulesStruct(Structure):
    """`Rules` of dynamic.c."""

    _fields_ = [
        (name, c_int64)
        for name in ("first_shard", "batch", "admit", "evict", "after", "swept", "pinned", "halved")
    ]


class DynamicLibrary:
    """The compiled functions. A call releases Python's lock."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        shards, rules, at = POINTER(ShardsStruct), POINTER(RulesStruct), c_void_p
        plan = (c_int, shards, shards, rules, c_int64, *[at] * 7)
        self.plan_batch = declare(library.plan_batch, *plan)
        self.count_missing = declare(library.count_missing, c_int, shards, rules, *[at] * 8)
        self.find_batch = declare(library.find_batch, None, shards, c_int64, c_int64, at, at)
        self.exchange = declare(library.exchange, None, shards, shards, c_int64, at, c_int)
        self.rebuild = declare(library.rebuild, None, shards)


@cache
def _load_once() -> tuple[DynamicLibrary | None, str]:
    return compile_and_load(SOURCE, DynamicLibrary)


def load_dynamic() -> DynamicLibrary:
    """Compiled at the first call. ValueError where it cannot be."""
    library, reason = _load_once()
    if library is None:
        raise ValueError(f"dynamic tables need a C compiler: {reason}")
    return library


def address(array: NDArray[Any]) -> int:
    """Of the first element. Whoever calls holds the array until C has returned."""
    return array.ctypes.data


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


@dataclass(frozen=True)
class Decided:
    """What a batch has decided, on the device that computes."""

    entries: Tensor  # [u] of keys
    inverse: Tensor | None  # [n]: key i has entries[inverse[i]]; None: entry i
    new: Tensor  # [m] entries of ids that got one
    new_ids: Tensor  # [m or more]: behind them there is anything
    inserted: Tensor | None  # [m] places of these ids among `entries`; None: not known
    removed: Tensor | None  # entries that were swept; -1 is none
    figures: BatchFigures
    changes: Any  # for `undo` and `redo` of the directory


def mark_any(marks: Tensor, inverse: Tensor, count: int) -> Tensor:
    """marks [n] uint8 of what has the numbers inverse [n] -> [count]: whether one of each is."""
    return marks.new_zeros(count).scatter_reduce_(0, inverse, marks, "amax")


class ShardArrays:
    """Entries of some virtual shards, as arrays that C works on."""

    def __init__(self, shards: int, rows: int, bits: int) -> None:
        """`rows`: of each shard; `bits`: of a hash, below its shard."""
        buckets, ahead = max(4, -(-rows * 3 // 2)), max(1, rows // 4)
        self.ids = np.zeros(shards * rows, np.int64)
        self.last = np.full(shards * rows, -1, np.int32)  # batch of the last use; -1: empty
        self.count = np.zeros(shards * rows, np.int32)  # batches that used it
        self._map = np.zeros(shards * buckets, np.int32)
        self._queue = np.zeros(shards * ahead, np.int32)
        self._numbers = np.zeros((5, shards), np.int32)
        arrays = (self.ids, self.last, self.count, self._map, *self._numbers[:2], self._queue)
        self.struct = ShardsStruct(
            shards, rows, buckets, ahead, bits, *map(address, (*arrays, *self._numbers[2:]))
        )

    @property
    def used(self) -> int:
        """Entries that hold an id."""
        return int(self._numbers[0].sum(dtype=np.int64))

    def get_tensors(self) -> dict[str, Tensor]:
        """Views of ids, last uses and counts."""
        return {
            "ids": torch.from_numpy(self.ids),
            "last_use": torch.from_numpy(self.last),
            "count": torch.from_numpy(self.count),
        }

    @property
    def nbytes(self) -> int:
        held = (self.ids, self.last, self.count, self._map, self._queue, self._numbers)
        return sum(array.nbytes for array in held)


class BatchClock:
    """Counts the batches that were decided on, and not undone."""

    def __init__(self, shards: int) -> None:
        self.clock = np.zeros(max(1, shards), np.int64)  # of each shard: all the same

    @property
    def batches(self) -> int:
        return int(self.clock[0])

    @batches.setter
    def batches(self, count: int) -> None:
        self.clock[:] = count


class Directory(BatchClock):
    """The ids of one rank's shards. An entry's number is its row's, among this rank's."""

    def __init__(self, rules: Dynamic, first_shard: int, last_shard: int) -> None:
        """For the shards [first, last). ValueError without a C compiler."""
        self._library = load_dynamic()
        self._rules, self._shards = rules, (first_shard, last_shard)
        count, bits, counters = last_shard - first_shard, rules.shard_bits, rules.shard_counters
        self.rows = ShardArrays(count, rules.shard_rows, bits)
        self.counters = ShardArrays(count, counters, bits) if counters else None
        super().__init__(count)

    @property
    def used(self) -> int:
        """Entries that hold an id."""
        return self.rows.used

    def decide(self, keys: Tensor, counted: Tensor | None = None, absent: int = -1) -> Decided:
        """`plan` of keys [n] on any device, in any order and as often as they occur. Waits for the
        device, which has to tell the keys. `absent`: the entry of ids that have none."""
        unique, inverse = torch.unique(keys, return_inverse=True)
        marks = None if counted is None else mark_any(counted, inverse, unique.numel())
        changes = self.plan(unique.cpu().numpy(), None if marks is None else marks.cpu().numpy())
        new, where = changes.found[changes.inserted], keys.device
        return Decided(
            entries=upload(np.where(changes.found < 0, absent, changes.found), where),
            inverse=inverse,
            new=upload(new, where),
            new_ids=upload(self.rows.ids[new], where),
            inserted=upload(changes.inserted, where),
            removed=upload(changes.removed, where) if changes.removed.size else None,
            figures=changes.figures,
            changes=changes,
        )

    def plan(self, keys: Numbers, counted: NDArray[np.uint8] | None = None) -> BatchChanges:
        """Decides for the next batch. keys [n] of its ids on this rank (layout.py), ascending and
        unique. counted [n]: 0 for those that are negatives alone, which use a row that is there and
        change nothing else; 2 for those that need no admission, and go first. None: all count."""
        keys = np.ascontiguousarray(keys)
        n = keys.size
        found, inserted = np.empty(n, np.int64), np.empty(n, np.int64)
        removed = np.empty(self._rules.shard_rows, np.int64)
        log = np.empty(3 * n + removed.size, CHANGE)
        figures = np.zeros(len(FIGURES), np.int64)
        failed = self._library.plan_batch(
            *self._tables, describe_rules(self._rules, self._shards, self.batches), n,
            address(keys), None if counted is None else address(counted),
            *map(address, (found, log, inserted, removed, figures)),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"the decisions about {n:,} ids need more memory than there is")
        self.batches += 1
        *counts, changes = figures.tolist()
        decided = BatchFigures(*counts)
        return BatchChanges(
            found,
            inserted[: decided.inserted].copy(),
            removed[: decided.swept].copy(),
            decided,
            log[:changes].copy(),
        )

    def find(self, keys: Tensor, absent: int = -1) -> Tensor:
        """Entries [n] of keys [n]; `absent` for those without a row. Changes nothing."""
        wanted = np.ascontiguousarray(keys.cpu().numpy())
        found = np.empty(wanted.size, np.int64)
        self._library.find_batch(
            self.rows.struct, self._shards[0], wanted.size, address(wanted), address(found)
        )
        found[found < 0] = absent
        return upload(found, keys.device)

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

    def get_tensors(self) -> dict[str, Tensor]:
        """By entry. Whoever writes to them calls `rebuild`."""
        return self.rows.get_tensors()

    def get_shard_tensors(self) -> dict[str, Tensor]:
        """What shards hold besides entries, [shards, ...]: batches, counts of waiting ids."""
        return get_shard_tensors(self.clock, self._shards, self.counters)

    def end_reading(self) -> None:
        """Nothing reads the arrays any more."""

    @property
    def _tables(self) -> tuple[ShardsStruct, ShardsStruct | None]:
        return self.rows.struct, self.counters.struct if self.counters is not None else None


def get_shard_tensors(
    clock: Numbers, shards: tuple[int, int], counters: ShardArrays | None
) -> dict[str, Tensor]:
    """Of the shards [first, last), as tensors [shards, ...]."""
    found = {"batches": torch.from_numpy(clock)[: shards[1] - shards[0]]}
    if counters is not None:
        for name, value in counters.get_tensors().items():
            found[f"counters.{name}"] = value.view(-1, counters.struct.rows)
    return found


def describe_rules(rules: Dynamic, shards: tuple[int, int], batch: int) -> RulesStruct:
    """For C: the rules of the shards [first, last) in a batch."""
    evict, (first, last) = rules.evict, shards
    after, swept = 0, -1
    if isinstance(evict, After):
        after, turn = evict.steps, batch % rules.shards
        swept = turn - first if first <= turn < last else -1
    return RulesStruct(
        first_shard=first,
        batch=batch,
        admit=rules.admit.batches,
        evict=EVICT[evict if isinstance(evict, str) else type(evict).__name__.lower()],
        after=after,
        swept=swept,
        pinned=PINNED,
        halved=evict.halved_every if isinstance(evict, LFU) else 0,
    )
