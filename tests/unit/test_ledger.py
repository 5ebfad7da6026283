"""The ledger's figures, on records whose answer is known by hand."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

import freescale
from freescale.ledger.collector import Collector
from freescale.ledger.ledger import Ledger
from freescale.ledger.merge import merge_step
from freescale.ledger.record import shift_clock
from freescale.ledger.summary import Summary
from freescale.ledger.waits import split_wait

MS = 1_000_000


def record(step, begin, end, spans=(), collectives=(), **counters):
    return {
        "step": step,
        "begin": begin * MS,
        "end": end * MS,
        "spans": [[name, a * MS, b * MS] for name, a, b in spans],
        "collectives": [[k, s, r, *(t * MS for t in times)] for k, s, r, *times in collectives],
        "counters": counters,
    }


@pytest.mark.parametrize(
    ("begin", "end", "last_arrival", "straggler", "exposed"),
    [
        (10, 35, 30, 20, 5),  # the last rank arrives during the wait
        (30, 35, 30, 0, 5),  # this rank is the last
        (20, 22, 5, 0, 2),  # overlapped: all had arrived before compute stopped
        (10, 35, 35, 25, 0),  # the result is there at once when the last rank arrives
        (10, 35, 40, 25, 0),  # the other host's clock is ahead
        (20, 20, 5, 0, 0),  # the result was there
        (20, 20, 30, 0, 0),
    ],
)
def test_a_wait_is_split_into_straggler_and_exposed(begin, end, last_arrival, straggler, exposed):
    parts = split_wait(begin, end, last_arrival)
    assert (parts.straggler, parts.exposed) == (straggler, exposed)
    # the same through the merge: rank 0 waits, rank 1 arrives last or long before
    waits = record(0, 0, 50, [], [("rows", 1, 1, min(begin, last_arrival), begin, end)])
    other = record(0, 0, 50, [], [("rows", 1, 1, last_arrival, end, end)])
    figures = merge_step([waits, other])
    assert figures["straggler_ms"][0] == straggler
    assert figures["exposed_ms_per_rank"][0] == exposed


def test_wait_is_split_at_the_last_arrival():
    """Rank 0 arrives at 10 and waits until 35; rank 1 arrives at 30: 20 ms straggler time, then 5
    ms exposed for each."""
    fast = record(
        0,
        0,
        50,
        [("forward", 0, 10)],
        [("rows", 100, 80, 10, 10, 35)],
        samples=4,
        tokens=20,
        max_length=10,
    )
    slow = record(
        0,
        0,
        50,
        [("forward", 0, 30)],
        [("rows", 80, 100, 30, 30, 35)],
        samples=6,
        tokens=40,
        max_length=12,
    )
    figures = merge_step([fast, slow])
    assert figures["straggler_ms"] == [20, 0]
    assert figures["straggler_percent"] == pytest.approx(100 * 10 / 50)
    assert figures["exposed_ms"]["rows"] == pytest.approx(5)
    assert sum(figures["exposed_ms"].values()) == pytest.approx(5)
    assert figures["bytes"]["rows"] == 180
    assert figures["imbalance"] == pytest.approx(30 / 20)
    assert figures["sparsity"] == pytest.approx(1 - 60 / (10 * 12))
    assert figures["samples"] == 10 and figures["tokens"] == 60


def test_an_overlapped_collective_exposes_only_what_stops_compute():
    """Issued at 0 and 5, waited for at 20: rank 0's result was there (no wait), rank 1 stood still
    for 2 ms."""
    early = record(0, 0, 30, [], [("ids", 8, 8, 0, 20, 20)])
    late = record(0, 0, 30, [], [("ids", 8, 8, 5, 20, 22)])
    figures = merge_step([early, late])
    assert figures["straggler_percent"] == 0
    assert figures["exposed_ms"]["ids"] == pytest.approx(1)


def test_clock_offsets_are_taken_out():
    here = record(0, 0, 50, [], [("rows", 1, 1, 10, 10, 35)])
    there = shift_clock(record(0, 1000, 1050, [], [("rows", 1, 1, 1030, 1030, 1035)]), -1000 * MS)
    assert merge_step([here, there])["straggler_ms"] == [20, 0]


def test_ranks_that_differ_in_their_collectives_are_reported():
    with pytest.raises(ValueError, match="different collectives in step 3"):
        merge_step(
            [
                record(3, 0, 1, [], [("ids", 1, 1, 0, 0, 1)]),
                record(3, 0, 1, [], [("rows", 1, 1, 0, 0, 1)]),
            ]
        )


def test_collisions():
    figures = merge_step(
        [record(1, 0, 1, requests=30, collisions=3), record(1, 0, 1, requests=10, collisions=5)]
    )
    assert figures["collision_percent"] == pytest.approx(20)
    assert "collision_percent" not in merge_step([record(1, 0, 1)])


def test_misses_and_bytes_of_caches_add_up_over_the_ranks():
    ranks = [record(1, 0, 10), record(1, 0, 10)]
    for number, one in enumerate(ranks):
        wanted = {"cache_wanted": 100, "cache_missed": 10 + 20 * number}
        one["counters"] |= wanted | {"cache_bytes_up": 7.0, "cache_bytes_down": 2.0 * number}
    figures = merge_step(ranks)
    assert figures["cache_miss_percent"] == pytest.approx(20)
    assert (figures["cache_bytes_up"], figures["cache_bytes_down"]) == (14, 2)
    assert "cache_miss_percent" not in merge_step([record(1, 0, 1)])


def test_shares_before_and_after_balancing():
    before = {
        "samples": 2,
        "tokens": 30,
        "max_length": 20,
        "before_cost": 3.0,
        "max_predicted_imbalance": 1.1,
        "max_moved_tokens": 4,
    }
    after = {"after_samples": 3, "after_tokens": 25, "after_longest": 9, "after_cost": 2.2}
    figures = merge_step(
        [
            record(0, 0, 1, **before, **after),
            record(0, 0, 1, **{**before, "before_cost": 1.0}, **after),
        ]
    )
    assert figures["before"] == {
        "samples": [2, 2],
        "tokens": [30, 30],
        "longest": [20, 20],
        "cost": [3, 1],
    }
    assert figures["after"] == {
        "samples": [3, 3],
        "tokens": [25, 25],
        "longest": [9, 9],
        "cost": [2.2, 2.2],
    }
    assert figures["predicted_imbalance_before"] == pytest.approx(1.5) and figures["samples"] == 4
    # not balanced, and a rank without data
    alone = merge_step([record(0, 0, 1, samples=2), record(0, 0, 1)])
    assert alone["before"] == {"samples": [2, 0]} and alone["after"] == {}


def test_bytes_by_path_are_the_bytes():
    """Also when a kind of traffic is not in every step; lines of an older version have neither
    paths nor what ranks did."""
    summary = Summary(1, warmup=0)
    for step, sent in enumerate((30, 0, 60)):
        made = record(step, 0, 1, [], [("samples", sent, 0, 0, 0, 1)] if sent else [])
        summary.add(
            merge_step(
                [
                    {
                        **made,
                        "paths": {"samples": {"gloo": sent}} if sent else {},
                        "busy": {"forward": 3 * MS},
                    }
                ]
            )
        )
    result = summary.summarize()
    assert result["paths"]["samples"]["gloo"] == result["bytes_per_step"]["samples"] == 30
    older = {
        k: v
        for k, v in merge_step([record(3, 0, 1)]).items()
        if k not in ("paths", "busy_ms", "exposed_ms_per_rank")
    }
    summary.add(older)
    result = summary.summarize()
    assert result["paths"]["samples"]["gloo"] == 30 and result["busy_ms_per_rank"] == {
        "forward": [3]
    }


def test_summary_leaves_the_warm_up_out():
    summary = Summary(1, warmup=2)
    for step, end in enumerate((1000, 1000, 10, 20, 60)):
        summary.add(merge_step([record(step, 0, end, samples=3, tokens=6)]))
    result = summary.summarize()
    assert result["steps"] == 5 and result["measured_steps"] == 3
    assert result["step_ms"] == {"mean": 30, "median": 20}
    assert result["samples_per_second"] == pytest.approx(9 / 0.09)
    assert Summary(1).summarize()["measured_steps"] == 0


def test_summary_averages_the_steps_on_its_number_of_ranks():
    """A run that was resumed on fewer ranks: what it did on more is counted only."""
    summary, alone = Summary(1, warmup=1), Summary(1, warmup=1)
    transfer = [("rows", 5, 5, 0, 0, 1)]
    for step in range(3):
        summary.add(merge_step([record(step, 0, 100, [], transfer, samples=9)] * 2))
    for step, end in enumerate((1000, 10, 20), 3):
        for one in (summary, alone):
            one.add(merge_step([record(step, 0, end, samples=3)]))
    result, expected = summary.summarize(), alone.summarize()
    assert (result.pop("steps"), expected.pop("steps")) == (6, 3)
    assert result.pop("steps_on_other_ranks") == {"2": 3}
    assert expected.pop("steps_on_other_ranks") == {}
    assert result == expected and result["measured_steps"] == 2


def test_a_ledger_records_inside_steps_only():
    ledger = Ledger()
    with ledger.span("outside"), ledger.begin_collective("rows", 1, 1, "gloo").wait():
        pass
    ledger.begin_step(4)
    with ledger.span("forward"), ledger.begin_collective("ids", 5, 6, "gloo").wait():
        pass
    ledger.count("samples", torch.tensor(2))
    ledger.count("samples", 3)
    ledger.end_step()
    ledger.begin_step(5)
    ledger.cancel_step()
    (drained,) = ledger.drain()
    assert ledger.drain() == []
    assert drained["step"] == 4 and drained["counters"] == {"samples": 5}
    assert [s[0] for s in drained["spans"]] == ["forward"]
    ((kind, sent, received, issued, waited, done),) = drained["collectives"]
    assert (kind, sent, received) == ("ids", 5, 6) and drained["carriers"] == [["", "gloo"]]
    assert sum(drained["busy"].values()) == drained["end"] - drained["begin"] - (done - waited)
    assert drained["begin"] <= issued <= waited <= done <= drained["end"]


def test_a_ledger_shows_its_steps():
    ledger = freescale.Ledger()
    assert repr(ledger) == "Ledger(0 finished steps)"
    ledger.clock = _LateClock()
    ledger.begin_step(7)
    with ledger.span("forward"), ledger.begin_collective("rows", 1, 1, "gloo").wait():
        pass
    ledger.end_step()
    ledger.begin_step(8)
    shown = "1 finished steps, last: step 7 in 0.00 ms, 1 spans, 1 collectives (rows)"
    assert repr(ledger) == f"Ledger({shown})"


def test_a_ledger_that_nobody_drains_stays_small():
    ledger = Ledger()
    for number in range(3000):
        ledger.begin_step(number)
        ledger.end_step()
    kept = [record["step"] for record in ledger.drain()]
    assert len(kept) == 1024 and kept[-1] == 2999


class _LateClock:
    """Stamps become readable when `now` has passed them, as a GPU's events do."""

    def __init__(self):
        self.now = 0
        self.next = 0

    def stamp(self):
        self.next += 1
        return self.next

    def read(self, stamp):
        return stamp if stamp <= self.now else None


def test_steps_that_the_device_has_not_finished_stay():
    ledger = Ledger()
    ledger.clock = clock = _LateClock()
    for number in range(2):
        ledger.begin_step(number)
        with ledger.span("forward"):
            pass
        ledger.end_step()
    assert ledger.drain() == []
    clock.now = 5  # the first step's four stamps, not the second's
    assert [r["step"] for r in ledger.drain()] == [0]
    clock.now = 99
    assert [r["step"] for r in ledger.drain()] == [1]


def test_files_of_a_run(tmp_path):
    ledger = Ledger()
    collector = Collector(ledger, 0, 1, lambda payload: [payload], tmp_path, trace_steps=3)
    for number in range(5):
        ledger.begin_step(number)
        with ledger.span("forward"), ledger.begin_collective("rows", 10, 10, "gloo").wait():
            pass
        ledger.end_step()
        if number == 2:
            collector.collect()
    result = collector.close()
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert json.loads((tmp_path / "ledger.json").read_text()) == result
    assert result["bytes_per_step"]["rows"] == 10
    assert result["peak_memory_bytes_per_rank"][0]["host"] > 10 << 20
    (machine,) = result["machines"]
    assert (
        machine["ranks"] == [0]
        and machine["cores"] >= 1
        and machine["versions"]["torch"] == torch.__version__
    )
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    steps = [e for e in events if e["name"].startswith("step ")]
    assert [e["name"] for e in steps] == ["step 0", "step 1", "step 2"]
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"forward", "rows"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")
