"""The plan of the exact cache against a plain one: a dict of rows and their last uses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.embedding.host_tables import plan as plan_module
from freescale.embedding.host_tables.plan import PINNED, CacheContents, CacheTooSmall, plan_cache

ROWS = 24
BATCHES = st.lists(st.sets(st.integers(0, ROWS - 1), max_size=7), max_size=30)


class PlainCache:
    """Rows and their last uses: brings what is missing, drops the oldest that are not pinned."""

    def __init__(self, slots: int) -> None:
        self.slots, self.last_use = slots, {}

    def plan(self, wanted: set[int], batch: int) -> tuple[list[int], list[tuple[int, int]]]:
        """(rows to bring, (last use, row) of those that leave, in this order)."""
        bring = sorted(wanted - self.last_use.keys())
        candidates = sorted(
            (use, row)
            for row, use in self.last_use.items()
            if use <= batch - PINNED and row not in wanted
        )
        excess = max(0, len(self.last_use) + len(bring) - self.slots)
        if excess > len(candidates):
            pinned = {row for row, use in self.last_use.items() if use > batch - PINNED}
            raise CacheTooSmall(len(pinned | wanted))
        leave = candidates[:excess]
        for _, row in leave:
            del self.last_use[row]
        self.last_use |= dict.fromkeys(wanted, batch)
        return bring, leave


def ascending(rows) -> torch.Tensor:
    return torch.tensor(sorted(rows), dtype=torch.int64)


@settings(max_examples=120, deadline=None)
@given(BATCHES, st.integers(1, ROWS), st.integers(1, 3))
def test_same_decisions_as_the_plain_cache(batches, slots, look):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "_LEAST_LOOK", look)
        patch.setattr(plan_module, "_LOOKS", look)
        compare_with_plain(batches, slots)


def compare_with_plain(batches, slots):
    contents, plain, memory = CacheContents.make(ROWS, slots), PlainCache(slots), {}
    for batch, wanted in enumerate(batches):
        before = contents.slot_of.clone(), contents.row_of.clone(), contents.last_use.clone()
        try:
            bring, leave = plain.plan(wanted, batch)
        except CacheTooSmall as expected:
            with pytest.raises(CacheTooSmall) as found:
                plan_cache(contents, ascending(wanted), batch)
            assert found.value.need == expected.need > slots
            return
        plan = plan_cache(contents, ascending(wanted), batch)
        now = contents.slot_of, contents.row_of, contents.last_use
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))  # pure
        assert (plan.bring.tolist(), plan.leave.tolist()) == (bring, [row for _, row in leave])
        assert plan.into[: len(leave)].tolist() == contents.slot_of[plan.leave].tolist()
        contents.apply(plan)
        if leave:  # what has been looked through is not looked through again
            first = contents.queue[0]
            assert (first.batch, first.rows[0]) > leave[-1]
        # What a memory with these slots holds: each wanted row in its slot, no row twice.
        memory |= dict(zip(plan.into.tolist(), plan.bring.tolist(), strict=True))
        assert [memory[slot] for slot in plan.slots.tolist()] == sorted(wanted)
        assert {memory[slot] for slot in memory} == plain.last_use.keys()
        assert len(memory) == len(plain.last_use) == contents.filled <= slots


def test_rows_of_three_batches_stay():
    """A cache for six rows, two of them in each batch: the fourth replaces the first."""
    contents = CacheContents.make(20, 6)
    for batch in range(3):
        plan = plan_cache(contents, ascending([2 * batch, 2 * batch + 1]), batch)
        contents.apply(plan)
        assert plan.leave.numel() == 0
    plan = plan_cache(contents, ascending([10, 11]), 3)
    assert plan.leave.tolist() == [0, 1]
    with pytest.raises(CacheTooSmall, match="3 consecutive batches read 7 rows"):
        plan_cache(contents, ascending([10, 11, 12]), 3)


def test_the_queue_stays_small_without_evictions():
    contents, plain = CacheContents.make(10, 10), PlainCache(10)
    for batch in range(300):
        wanted = {batch % 6, (batch + 3) % 6, *([9, 8] if batch < 2 else [])}
        wanted = wanted if batch < 200 else set()  # and if batches read nothing of this table
        plain.plan(wanted, batch)
        contents.apply(plan_cache(contents, ascending(wanted), batch))
        assert sum(used.rows.numel() for used in contents.queue) <= 2 * contents.slots + 2
        assert all(used.rows.numel() for used in contents.queue)
    # and what it forgot was old: rows still go in the order of their last use
    order = [row for _, row in sorted((use, row) for row, use in plain.last_use.items())]
    assert order[:2] == [8, 9]
    assert contents.find_oldest(len(order), ascending([]), 300).rows.tolist() == order
