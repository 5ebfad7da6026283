"""The parts of a step add up to the step, on every rank: what it did, and each of its waits,
once."""

from __future__ import annotations

import json
import threading
import time
from functools import partial

import pytest
from helpers.collisions import batch_of, build, colliding, share_of
from helpers.ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.embedding.collision import collision_masks
from freescale.ledger.merge import merge_step
from freescale.ledger.record import CollectiveRecord
from freescale.ledger.summary import Summary
from freescale.ledger.waits import assign_waits
from freescale.pipeline.staged import Staged

HELD = 0.02  # seconds


def _slow_lane(transport, schedule, dense_sums):
    """A lane that works on its own while the main thread already waits for it."""
    waiting = threading.Event()

    def masks(current, following):
        waiting.wait(timeout=30)
        waiting.clear()
        time.sleep(HELD)
        return collision_masks(current, following)

    made = partial(Staged, masks=masks) if schedule == "staged" else schedule
    parallel, pipeline = build(transport, made, dense_sums=dense_sums)
    if schedule == "staged":
        await_rows = pipeline.schedule._await_rows
        pipeline.schedule._await_rows = lambda current: (waiting.set(), await_rows(current))
    batches = [
        share_of(batch_of(ids, number), transport)
        for number, ids in enumerate(colliding(0.3, steps=8))
    ]
    list(pipeline.run(batches))
    gathered = transport.gather_bytes(json.dumps(pipeline.ledger.drain()).encode())
    return [json.loads(part) for part in gathered]


@pytest.mark.parametrize(
    ("schedule", "dense_sums"),
    [("serial", "collective"), ("staged", "collective"), ("staged", "partitioned")],
)
def test_the_parts_of_a_step_add_up_to_it(schedule, dense_sums):
    records = run_ranks(3, _slow_lane, schedule, dense_sums)[0]
    summary = Summary(3)
    for step in zip(*records, strict=True):
        figures = merge_step(step)
        summary.add(figures)
        for rank, record in enumerate(step):
            parts = (
                figures["straggler_ms"][rank]
                + figures["exposed_ms_per_rank"][rank]
                + figures["lane_ms"][rank]
            )
            parts += sum(values[rank] for values in figures["busy_ms"].values())
            assert parts == pytest.approx((record["end"] - record["begin"]) / 1e6, abs=0.05)
        # the last has no batch to compare with
        held = schedule == "staged" and 0 < figures["step"] < 7
        # the first to wait: nobody communicates yet
        assert not held or max(figures["lane_ms"]) >= 0.9 * 1e3 * HELD
        assert not {"arrive", "await batch", "await sums"} & set(figures["busy_ms"])
    result = summary.summarize()
    assert len(result["lane_ms_per_rank"]) == 3 and result["step_ms"]["mean"] == pytest.approx(
        sum(sum(values) for values in result["busy_ms_per_rank"].values()) / 3
        + sum(sum(result[f"{name}_ms_per_rank"]) for name in ("straggler", "exposed", "lane")) / 3,
        abs=0.05,
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=8))
def test_overlapping_waits_are_counted_once(drawn):
    """Moment by moment: each belongs to the collective that is done last."""
    entries = [CollectiveRecord("rows", 1, 1, 0, begin, begin + length) for begin, length in drawn]
    parts = assign_waits(entries)
    for moment in range(31):
        covering = [
            number for number, entry in enumerate(entries) if entry[-2] <= moment < entry[-1]
        ]
        owners = [
            number for number, own in enumerate(parts) if any(a <= moment < b for a, b in own)
        ]
        assert len(owners) == bool(covering)
        assert all(
            entries[owner][-1] == max(entries[number][-1] for number in covering)
            for owner in owners
        )
