"""Dynamic tables as obvious Python: one dictionary for each virtual shard. Slow, and with nothing
of the arrays and queues of the real one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from freescale.embedding.dynamic_rules import LFU, PINNED, SHARDS, After, Dynamic

MASK = (1 << 64) - 1


@dataclass(frozen=True)
class FineDynamic(Dynamic):
    """With as many shards as a large table, so that few ids fill one."""

    @property
    def shards(self) -> int:
        return SHARDS


def mix(value: int) -> int:
    value &= MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def shard_of(id: int, shards: int = SHARDS) -> int:
    return mix(id) * shards >> 64


@dataclass
class Shard:
    rows: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # id: slot, last, count
    counters: dict[int, tuple[int, int]] = field(default_factory=dict)  # id: last, count


class Oracle:
    def __init__(self, rules: Dynamic) -> None:
        self.rules = rules
        self.shards: dict[int, Shard] = defaultdict(Shard)
        self.batch = 0
        self.figures = dict.fromkeys(
            ("inserted", "evicted", "swept", "turned_away", "waiting", "forgotten"), 0
        )

    def plan(
        self, ids: set[int], negatives: set[int] = frozenset(), at_once: set[int] = frozenset()
    ) -> dict[int, int]:
        """Position of each id in the table, -1 without a row. `negatives`: of the ids; `at_once`:
        those that need no admission and go first."""
        self.at_once = at_once
        self.figures = dict.fromkeys(self.figures, 0)
        found: dict[int, int] = {}
        numbers = {shard_of(id, self.rules.shards) for id in ids}
        if isinstance(self.rules.evict, After):
            numbers.add(self.batch % self.rules.shards)
        for number in numbers:
            mine = [id for id in ids if shard_of(id, self.rules.shards) == number]
            mine.sort(key=lambda id: (id not in at_once, id))
            found |= self._plan_shard(number, self.shards[number], mine, negatives)
        self.batch += 1
        return found

    def _plan_shard(self, number, shard: Shard, ids: list[int], negatives) -> dict[int, int]:
        found = {}
        for id in ids:
            if id in shard.rows:
                slot, last, count = shard.rows[id]
                count = self._decay(count, last) + (id not in negatives)
                shard.rows[id] = slot, self.batch, count
                found[id] = slot
        evict = self.rules.evict
        if isinstance(evict, After) and number == self.batch % self.rules.shards:
            for id, (_, last, _) in list(shard.rows.items()):
                if last < self.batch - evict.steps:
                    del shard.rows[id]
                    self.figures["swept"] += 1
        for id in ids:
            if id not in found:
                found[id] = -1 if id in negatives else self._insert(shard, id)
        return {
            id: slot if slot < 0 else number * self.rules.shard_rows + slot
            for id, slot in found.items()
        }

    def _insert(self, shard: Shard, id: int) -> int:
        count = 1 if id in self.at_once else self._count(shard, id)
        if count < self.rules.admit.batches and id not in self.at_once:
            self.figures["waiting"] += 1
            return -1
        taken = {slot for slot, _, _ in shard.rows.values()}
        free = [slot for slot in range(self.rules.shard_rows) if slot not in taken]
        if free:
            slot = free[0]
        else:
            victim = self._choose_victim(shard)
            if victim is None:
                self.figures["turned_away"] += 1
                return -1
            slot = shard.rows.pop(victim)[0]
            self.figures["evicted"] += 1
        shard.rows[id] = slot, self.batch, count
        shard.counters.pop(id, None)
        self.figures["inserted"] += 1
        return slot

    def _count(self, shard: Shard, id: int) -> int:
        room = self.rules.shard_counters
        if not room:
            return 1
        if id in shard.counters:
            shard.counters[id] = self.batch, shard.counters[id][1] + 1
            return shard.counters[id][1]
        if len(shard.counters) == room:
            old = [(last, i) for i, (last, _) in shard.counters.items() if last < self.batch]
            if not old:
                return 1
            del shard.counters[min(old)[1]]
            self.figures["forgotten"] += 1
        shard.counters[id] = self.batch, 1
        return 1

    def _choose_victim(self, shard: Shard) -> int | None:
        if isinstance(self.rules.evict, After):
            return None
        by_count = self.rules.evict == "lfu" or isinstance(self.rules.evict, LFU)
        able = [
            (self._decay(count, last) if by_count else 0, last, id)
            for id, (_, last, count) in shard.rows.items()
            if last < self.batch - (PINNED - 1)
        ]
        return min(able)[2] if able else None

    def _decay(self, count: int, last: int) -> int:
        """Halved whenever the number of a batch is a multiple of `halved_every`."""
        if not isinstance(self.rules.evict, LFU):
            return count
        for batch in range(last + 1, self.batch + 1):
            if batch % self.rules.evict.halved_every == 0:
                count //= 2
        return count

    def state(self) -> list[tuple[int, int, int, int, int]]:
        """(shard, slot, id, last, count) of all rows."""
        return sorted(
            (number, slot, id, last, count)
            for number, shard in self.shards.items()
            for id, (slot, last, count) in shard.rows.items()
        )

    def counted(self) -> list[tuple[int, int, int, int]]:
        """(shard, id, last, count) of all counters."""
        return sorted(
            (number, id, last, count)
            for number, shard in self.shards.items()
            for id, (last, count) in shard.counters.items()
        )
