"""A step much slower than those before it is found, and its figures say who made it wait."""

from __future__ import annotations

from freescale.ledger.collector import SlowSteps, explain


def figures(step: int, seconds: float, **changes) -> dict:
    """Of two ranks that are alike: everything is work, but for 2 ms each of waiting."""
    busy = seconds * 1e3 - 4
    usual = {
        "step": step,
        "step_ms": seconds * 1e3,
        "straggler_ms": [1.0, 1.0],
        "exposed_ms": {"rows": 1.0, "dense": 0.5},
        "exposed_ms_per_rank": [1.5, 1.5],
        "lane_ms": [0.5, 0.5],
        "busy_ms": {"forward": [busy / 2, busy / 2], "backward": [busy / 2, busy / 2]},
    }
    return usual | changes


LATE = {"straggler_ms": [7900.0, 0.0], "busy_ms": {"forward": [90.0, 100.0], "data": [9.0, 7990.0]}}


def test_what_a_step_waited_for_and_which_rank_it_was():
    late = explain(figures(0, 8.0, **LATE))
    assert late == "the other ranks waited 7.90 s for rank 1 ('data' for 7.99 s)"
    short = {"forward": [90.0, 100.0]}
    exposed = {"exposed_ms": {"rows": 5000.0, "dense": 1.0}, "exposed_ms_per_rank": [9.0, 7993.0]}
    words = explain(figures(0, 8.0, busy_ms=short, **exposed))
    assert words == "5.00 s of waiting for rows on their way, longest on rank 1"
    words = explain(figures(0, 8.0, busy_ms=short, lane_ms=[7900.0, 2.0]))
    assert words == "rank 0 waited 7.90 s for its own lanes"
    alone = figures(0, 8.0, straggler_ms=[0.0], exposed_ms_per_rank=[0.0], lane_ms=[0.0])
    alone |= {"exposed_ms": {"rows": 0.0}, "busy_ms": {"forward": [2.0], "data": [7990.0]}}
    assert explain(alone) == "rank 0 worked ('data' for 7.99 s)"


def test_only_what_is_much_slower_than_before_is_found():
    slow = SlowSteps()
    slow.add(figures(0, 9.0))  # nothing to compare with
    for step in range(1, 30):
        slow.add(figures(step, 0.2 if step % 5 else 0.9))  # varies, by less than a second
    assert slow.take() == []
    slow.add(figures(30, 3.0))
    slow.add(figures(31, 8.0, **LATE))
    slow.add(figures(32, 0.2))
    (entry,) = slow.take()  # one warning for all that is collected at a time
    assert entry["step"] == 32 and entry["slow_step"]["usual"] == 0.2
    assert entry["slow_step"]["why"].startswith("the other ranks waited")
    assert [found["step"] for found in slow.found] == [31, 32] and slow.take() == []


def test_a_run_that_has_become_slow_is_not_reported_for_ever():
    slow, found = SlowSteps(), 0
    for step in range(400):
        slow.add(figures(step, 0.2 if step < 100 else 4.0))
        found += len(slow.take())
    assert 40 < found < 60 and len(slow.found) == 20
