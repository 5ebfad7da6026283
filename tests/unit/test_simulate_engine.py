"""Schedules: what must hold in every case, and a tiny case against a loop that moves every thread
by ticks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from freescale.simulate.compute import Calibration, Curve, Model, RowWork, Shape
from freescale.simulate.costs import Costs
from freescale.simulate.generated_workload import GeneratedWorkload, PooledFeatures
from freescale.simulate.network import Link, Network
from freescale.simulate.output import collect_run, make_records
from freescale.simulate.ranks import Overlap, slow_down
from freescale.simulate.schedules import SCHEDULES
from freescale.simulate.simulator import Cluster, Setting, plan_batches, simulate
from freescale.simulate.workload import SmallTable
from freescale.visible import Visible

STEPS = 6
MODEL = Model(width=8, layers=2, heads=2, longest=1000)
NETWORK = Network(
    "tiny", 2, 2, Link(0.05, 20.0), Link(0.01, 50.0), Link(0.04, 10.0), per_peer_us=5.0
)
WORK = RowWork(2e-7, 1e-7, 1e-9, 3e-9, 1e-10, 1e-10, 1e-5)
CURVES = Curve(2e-8, 2e-6), Curve(5e-8, 3e-6)
CALIBRATION = Calibration(
    "tiny",
    "by hand",
    {},
    "",
    (Shape(8, 2, "bf16", 1000, *CURVES),),
    WORK,
    1e-8,
    1e-4,
    {"collective": 1.2, "hostwire": 1.01},
)


def source(ranks: int, **changed) -> GeneratedWorkload:
    return GeneratedWorkload(
        8 * ranks, **({"median": 150, "cap": 1000, "items": 200_000, "collisions": 0.2} | changed)
    )


def figures(setting: Setting, ranks: int = 8, network: Network = NETWORK, **changed) -> dict:
    cluster = Cluster(MODEL, CALIBRATION, network, ranks)
    return collect_run(simulate(setting, cluster, source(ranks, **changed), STEPS), ranks)


@pytest.mark.parametrize("balance", ["none", "greedy"])
@pytest.mark.parametrize("transport", ["collective", "hostwire"])
def test_every_overlap_helps(balance, transport):
    steps = [
        figures(Setting(schedule, balance, transport))["step_ms"]["mean"]
        for schedule in ("serial", "sparse_dist", "staged", "stale")
    ]
    serial, sparse_dist, staged, stale = steps
    # What is urgent runs beside the dense AllReduce and slows no compute down: by so little staged
    # may be ahead of stale.
    assert serial >= sparse_dist >= staged >= 0.995 * stale


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_gpu_waits_for_nobody(schedule):
    found = figures(Setting(schedule, "greedy"), ranks=1)
    assert (
        found["straggler_percent"] == 0
        and found["exposed_percent"] == 0
        and sum(found["bytes_per_step"].values()) == 0
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("balance", ["greedy", "fixed", "local"])
def test_balancing_leaves_less_straggler(schedule, balance):
    assert (
        figures(Setting(schedule, balance))["straggler_percent"]
        <= figures(Setting(schedule))["straggler_percent"]
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("part", ["near", "far", "pcie"])
def test_twice_the_bandwidth_never_slows_down(schedule, part):
    link = getattr(NETWORK, part)
    faster = replace(NETWORK, **{part: replace(link, gb_per_s=2 * link.gb_per_s)})
    for transport in ("collective", "hostwire"):
        setting = Setting(schedule, "greedy", transport)
        assert figures(setting, network=faster)["step_ms"]["mean"] <= figures(setting)["step_ms"][
            "mean"
        ] * (1 + 1e-9)


def test_the_same_run_twice_is_the_same():
    assert figures(Setting("staged", "greedy")) == figures(Setting("staged", "greedy"))


def test_more_collisions_expose_more():
    exposed = [
        sum(figures(Setting("staged"), collisions=rate)["exposed_ms"].values())
        for rate in (0.0, 0.25, 0.5, 0.75)
    ]
    assert exposed == sorted(exposed) and exposed[0] < exposed[-1]


@pytest.mark.parametrize("schedule", ["serial", "staged"])
def test_divided_histories_leave_less_straggler_and_travel(schedule):
    """One sample of each rank: the longest decides the step, unless it is divided."""
    given, workload = (
        Setting(schedule, "greedy"),
        GeneratedWorkload(4, median=300, cap=1000, items=200_000, collisions=0.2),
    )
    found = []
    for split in ("off", "3"):
        cluster = Cluster(MODEL, CALIBRATION, NETWORK, 4, split_histories=split)
        found.append(collect_run(simulate(given, cluster, workload, STEPS), 4))
    whole, divided = found
    assert divided["straggler_percent"] < 0.7 * whole["straggler_percent"]
    assert divided["tokens_per_second"] > whole["tokens_per_second"]
    assert divided["bytes_per_step"]["attention"] > whole["bytes_per_step"]["attention"] == 0


def test_planned_batches_change_nothing():
    cluster, setting = Cluster(MODEL, CALIBRATION, NETWORK, 8), Setting("staged", "greedy")
    planned = plan_batches("greedy", cluster, source(8), STEPS)
    assert collect_run(simulate(setting, cluster, source(8), STEPS, planned), 8) == figures(setting)


def test_a_learning_cost_model_balances_what_the_frozen_one_does_not():
    """The curve here has no linear part to speak of, the model's operations have."""
    # a sample costs, however short
    shape = Shape(8, 2, "bf16", 1000, Curve(2e-8, 0.0, 2e-3), Curve(5e-8, 0.0, 3e-3))
    cluster = Cluster(MODEL, replace(CALIBRATION, shapes=(shape,)), NETWORK, 8)
    frozen, adapted = (
        collect_run(simulate(Setting("serial", "greedy", adapt=adapt), cluster, source(8), 12), 8)[
            "straggler_percent"
        ]
        for adapt in (False, True)
    )
    assert adapted < frozen


def test_jitter_is_what_balancing_cannot_mend():
    cluster = Cluster(MODEL, CALIBRATION, NETWORK, 8, jitter=0.05)
    assert (
        collect_run(simulate(Setting("serial", "greedy"), cluster, source(8), STEPS), 8)[
            "straggler_percent"
        ]
        > 2
    )


def test_what_is_visible_decides_compute_and_assignments():
    """A window beyond every history changes nothing; a short one leaves terms in proportion to the
    tokens."""
    setting, spans = Setting("serial", "greedy"), {}
    for visible in (None, Visible(0, 2000), Visible(2, 6)):
        cluster = Cluster(replace(MODEL, visible=visible), CALIBRATION, NETWORK, 4)
        (batch, *_) = plan_batches("greedy", cluster, source(4), STEPS)
        spans[visible] = collect_run(simulate(setting, cluster, source(4), STEPS), 4)["spans_ms"]
        if visible is not None:
            lengths = source(4).get_lengths(0)
            pairs = 2 * visible.count_pairs(lengths).sum()
            assert batch.load.squares.sum() == pytest.approx(pairs)
    whole, wide, narrow = (found["forward"] for found in spans.values())
    assert wide == pytest.approx(whole, rel=0.01) and narrow < 0.5 * whole


def test_not_deduplicating_sends_every_event():
    whole, once = (
        figures(Setting(deduplicate=flag))["bytes_per_step"]["rows"] for flag in (False, True)
    )
    assert whole > once
    with pytest.raises(ValueError, match="needs requests without duplicates"):
        Setting("staged", deduplicate=False)


@pytest.mark.parametrize("ranks", [4, 8])
def test_sums_of_pooled_features_grow_with_the_ranks_and_rows_with_the_ids(ranks):
    def count_bytes(schedule: str, ids: int) -> float:
        pooled = PooledFeatures(features=5, ids=ids, rows=1 << 40, popularity=0.0)
        setting = Setting(schedule, placement="sharded")
        found, plain = (
            figures(setting, ranks, pooled=each)["bytes_per_step"]["rows"]
            for each in (pooled, None)
        )
        return (found - plain) / ranks

    width = 4 * MODEL.width
    bags = 5 * len(source(ranks).get_lengths(0)) / ranks
    for ids in (1, 3):
        sums = (ranks - 1) * bags * width
        assert count_bytes("sparse_dist", ids) == pytest.approx(sums, rel=1e-3)
        rows = ids * bags * width * (ranks - 1) / ranks
        assert count_bytes("serial", ids) == pytest.approx(rows, rel=1e-3)


def test_a_small_table_is_replicated_by_the_rule_of_training():
    cluster = Cluster(MODEL, CALIBRATION, NETWORK, 8)
    small = source(8, items=2000, collisions=None)
    found = {
        name: collect_run(simulate(Setting("staged", placement=name), cluster, small, STEPS), 8)
        for name in ("auto", "sharded")
    }
    assert (
        found["auto"]["bytes_per_step"]["rows"] == 0 < found["auto"]["bytes_per_step"]["gradients"]
    )
    assert found["sharded"]["bytes_per_step"]["rows"] > 0
    with pytest.raises(ValueError, match="placement 'everywhere'"):
        Setting(placement="everywhere")


def test_host_tables_cost_what_exceeds_the_compute():
    """Rows and state, down and up over PCIe: blocking in serial, beside the compute in staged."""
    hosted = {"placement": "host", "cache_miss": 40.0}
    plain = figures(Setting("serial", placement="sharded"))
    serial = figures(Setting("serial", **hosted))
    assert serial["cache_miss_percent"] == pytest.approx(40)
    batches = plan_batches("none", Cluster(MODEL, CALIBRATION, NETWORK, 8), source(8), STEPS)[2:]
    rows = 0.4 * np.mean([batch.demand.whole.owned.sum() for batch in batches])
    size = rows * 4 * MODEL.width * 3  # Adam's moments
    assert MODEL.row_optimizer == "adam"
    assert serial["cache_bytes_up"] == serial["cache_bytes_down"] == pytest.approx(size, rel=1e-3)
    seconds = 2 * (size / 8 / (NETWORK.pcie.gb_per_s * 1e9) + NETWORK.pcie.latency)
    more = serial["step_ms"]["mean"] - plain["step_ms"]["mean"]
    assert more == pytest.approx(1e3 * seconds, rel=0.02)

    def time_staged(gb_per_s: float, placement: str) -> float:
        network = replace(NETWORK, pcie=Link(gb_per_s, 10.0))
        setting = Setting("staged", placement=placement, cache_miss=40.0)
        return figures(setting, network=network)["step_ms"]["mean"]

    assert time_staged(50.0, "host") == pytest.approx(time_staged(50.0, "sharded"), rel=0.001)
    slow = size / 8 / 10  # bytes a second: ten seconds a way, longer than any compute here
    longer = time_staged(slow / 2e9, "host") - time_staged(slow / 1e9, "host")
    assert longer == pytest.approx(1e3 * 20, rel=0.02)


def test_a_replicated_table_does_not_keep_staged_from_preparing_ahead():
    cluster = Cluster(MODEL, CALIBRATION, NETWORK, 8)
    small = source(8, items=2000, collisions=None)
    serial, staged = (
        collect_run(simulate(Setting(name, "greedy"), cluster, small, STEPS), 8)
        for name in ("serial", "staged")
    )
    assert serial["collision_percent"] is None  # nothing is requested
    assert staged["exposed_ms"]["counts"] + staged["exposed_ms"]["samples"] < 1e-6
    assert serial["exposed_ms"]["dense"] > staged["exposed_ms"]["dense"]
    assert serial["bytes_per_step"]["gradients"] == staged["bytes_per_step"]["gradients"]


def test_a_small_table_is_summed_beside_a_sharded_one():
    class WithActions(GeneratedWorkload):
        def list_small_tables(self, ranks):
            return [SmallTable("action", 50, 50.0)]

    cluster = Cluster(MODEL, CALIBRATION, NETWORK, 8)
    options = {"median": 150, "cap": 1000, "items": 200_000, "collisions": 0.2}
    for schedule in SCHEDULES:
        alone, beside = (
            collect_run(simulate(Setting(schedule), cluster, kind(64, **options), STEPS), 8)
            for kind in (GeneratedWorkload, WithActions)
        )
        more = beside["bytes_per_step"]["gradients"] - alone["bytes_per_step"]["gradients"]
        # an AllReduce of 50 rows and a mark for each: 2 (n - 1) / n of it leaves each of 8 ranks
        assert more == pytest.approx(8 * 2 * 7 / 8 * 50 * (8 * 4 + 4), rel=1e-3)
        assert beside["bytes_per_step"]["rows"] == alone["bytes_per_step"]["rows"]


def test_torchrecs_ranks_agree_on_nothing():
    sparse_dist, serial = (figures(Setting(name)) for name in ("sparse_dist", "serial"))
    assert sparse_dist["bytes_per_step"]["counts"] == 0 < serial["bytes_per_step"]["counts"]
    # the ids of the next batch travel during compute; rows and gradients are waited for
    assert sparse_dist["exposed_ms"]["ids"] < 0.1 * serial["exposed_ms"]["ids"]
    for kind in ("rows", "gradients"):
        assert sparse_dist["exposed_ms"][kind] > 0.9 * serial["exposed_ms"][kind]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="schedule 'fast'"):
        Setting("fast")
    with pytest.raises(ValueError, match="transport 'pigeon'"):
        Setting(transport="pigeon")
    with pytest.raises(ValueError, match="unknown partitioner"):
        figures(Setting(balance="nobody"))
    with pytest.raises(ValueError, match="do not fill nodes"):
        figures(Setting(), ranks=7)


def test_records_have_the_ledgers_form():
    cluster = Cluster(MODEL, CALIBRATION, NETWORK, 4)
    steps = list(simulate(Setting("staged", "greedy"), cluster, source(4), 4))
    made = make_records(steps[2])
    assert len(made) == 4 and set(made[0]) == {
        "step",
        "begin",
        "end",
        "spans",
        "collectives",
        "paths",
        "counters",
    }
    for record in made:
        for _, _, _, issued, waited, done in record["collectives"]:
            assert issued <= done and waited <= done
        assert record["begin"] <= record["end"] and {"forward", "backward", "arrive"} <= {
            name for name, *_ in record["spans"]
        }
    assert [step.number for step in steps] == [0, 1, 2, 3]


def test_of_the_dense_gradients_only_the_last_bucket_is_exposed():
    """Where a bucket's AllReduce takes less than its part of the backward; serial waits for all of
    them."""
    wide = Model(width=1024, layers=8, heads=2, longest=1000)
    curves = tuple(Curve(0.0, 5000 * curve.linear) for curve in CURVES)
    calibration = replace(
        CALIBRATION, shapes=(Shape(1024, 2, "bf16", 1000, *curves),), slowdown={"collective": 1.0}
    )
    network = replace(NETWORK, near=Link(50.0, 20.0), far=Link(10.0, 50.0), pcie=Link(40.0, 10.0))
    cluster = Cluster(wide, calibration, network, 4)
    exposed = {
        name: collect_run(simulate(Setting(name), cluster, source(4, median=50, cap=2), STEPS), 4)[
            "exposed_ms"
        ]["dense"]
        for name in ("serial", "stale")
    }
    losses, *buckets = (
        1e3 * message[2][0]
        for message in Costs(wide, calibration, network, 4, "collective", 8).dense()
    )
    assert len(buckets) > 4
    assert exposed["serial"] == pytest.approx(losses + sum(buckets), rel=0.01)
    assert exposed["stale"] == pytest.approx(buckets[-1], rel=0.05)


# ---- against brute force


def test_compute_is_slowed_by_what_is_beside_it():
    """Three ranks, two things beside; against a clock that moves by ticks."""
    begin, seconds = np.array([0.0, 1.0, 2.0]), np.array([3.0, 0.5, 4.0])
    beside = [
        Overlap(np.array([1.0, 1.2, 1.0]), np.array([2.0, 1.4, 3.0]), 0.0),
        Overlap(np.full(3, 2.5), np.full(3, 4.5), 0.5),
    ]
    tick, ends = 1e-4, []
    for rank in range(3):
        now, left = begin[rank], seconds[rank]
        while left > 0:
            active = [one.speed for one in beside if one.begin[rank] <= now < one.end[rank]]
            left -= tick * (active[0] if active else 1.0)
            now += tick
        ends.append(now)
    np.testing.assert_allclose(slow_down(begin, seconds, beside), ends, atol=1e-3)


Thread = Iterator[tuple[str, float]]


class Ticking:
    """Every thread of every rank, moved a tick at a time. A thread yields what it does next: work,
    compute, meet or wait."""

    def __init__(self, ranks: int, slowdown: float, tick: float) -> None:
        self.ranks, self.slowdown, self.tick, self.now = ranks, slowdown, tick, 0.0
        self.met: dict[tuple[str, int], list[int]] = {}

    def run(self, threads: dict[tuple[int, str], Thread]) -> None:
        doing: dict[tuple[int, str], list] = {}  # [what, seconds left]
        for key, thread in threads.items():
            doing[key] = list(next(thread))
        while doing:
            busy = {key: self._transfers(key, one) for key, one in doing.items()}
            for key, one in list(doing.items()):
                rank, lane = key
                if one[0] == "until":
                    over = one[1]()
                elif one[0].startswith("meet"):
                    if busy[key]:  # two transfers of a rank have half of its network each
                        shared = sum(busy.get((rank, other), False) for other in ("main", "ahead"))
                        # what the host says is too small to count
                        one[1] -= self.tick / (1 if lane == "input" else shared)
                    over = one[1] <= 0
                else:
                    speed = 1.0
                    ahead = doing.get((rank, "ahead"))
                    if one[0] == "compute" and ahead is not None:
                        speed = (
                            0.0
                            if ahead[0] == "work"
                            else 1 / self.slowdown
                            if busy[(rank, "ahead")]
                            else 1.0
                        )
                    one[1] -= self.tick * speed
                    over = one[1] <= 0
                if over:
                    following = next(threads[key], None)
                    if following is None:
                        del doing[key]
                    else:
                        doing[key] = list(following)
            self.now += self.tick

    def _transfers(self, key: tuple[int, str], one: list) -> bool:
        """Whether all ranks have come to the collective."""
        if not one[0].startswith("meet"):
            return False
        came = self.met.setdefault(one[0], set())  # type: ignore[arg-type]
        came.add(key[0])  # type: ignore[attr-defined]
        return len(came) == self.ranks


@pytest.mark.parametrize("schedule", ["serial", "stale"])
def test_a_tiny_run_against_ticks(schedule):
    """Four ranks, no latency (so that what is empty takes no time), compute long enough to hide the
    lane, and once not."""
    for speed in (1.0, 0.05):
        network = replace(
            NETWORK,
            near=Link(0.05, 0.0),
            far=Link(0.01, 0.0),
            pcie=Link(0.04, 0.0),
            per_peer_us=0.0,
        )
        curves = [Curve(speed * curve.quadratic, speed * curve.linear) for curve in CURVES]
        calibration = replace(
            CALIBRATION,
            shapes=(Shape(8, 2, "bf16", 1000, *curves),),
            rows=replace(WORK, constant=0.0),
        )
        cluster, setting = Cluster(MODEL, calibration, network, 4), Setting(schedule)
        steps = list(simulate(setting, cluster, source(4), 4))
        batches = plan_batches("none", cluster, source(4), 4)
        costs = Costs(MODEL, calibration, network, 4, "collective", 8)
        tick = steps[-1].end.max() / 20_000
        loop = Ticking(4, 1.2, tick)
        ends = np.zeros((4, 4))
        started, finished, told = np.full(4, -1), np.full(4, -1), np.full(4, -1)

        def main(rank: int) -> Thread:
            for number, batch in enumerate(batches):  # noqa: B023
                blocking = schedule == "serial" or number == 0
                counted = ["counts"] * blocking + ["following counts"] * (
                    schedule == "stale" and number == 0
                )
                for which in counted:
                    yield f"meet {which} {number}", float(costs.counts(False)[2][rank])  # noqa: B023
                if blocking:
                    yield from ask(rank, number, "main")
                    yield "work", float(costs.lookup(batch.demand.whole)[rank])  # noqa: B023
                    yield f"meet rows {number}", float(costs.rows(batch.demand.whole)[2][rank])  # noqa: B023
                if schedule == "stale" and number:
                    yield "until", lambda: finished[rank] >= number - 1  # type: ignore[misc] # noqa: B023
                started[rank] = number  # noqa: B023
                yield "compute", float(costs.forward(batch)[rank])  # noqa: B023
                yield "compute", float(costs.backward(batch)[rank])  # noqa: B023
                if schedule == "serial":
                    gradients = costs.gradients(batch.demand.whole)[2]  # noqa: B023
                    yield f"meet gradients {number}", float(gradients[rank])
                    yield "work", float(costs.update(batch.demand.whole)[rank])  # noqa: B023
                dense = costs.dense()  # noqa: B023
                yield f"meet dense {number}", sum(float(message[2][rank]) for message in dense)
                yield "work", costs.optimizer  # noqa: B023
                if schedule == "stale" and number < 3:
                    yield "until", lambda: told[rank] >= number  # type: ignore[misc] # noqa: B023
                ends[number, rank] = loop.now  # noqa: B023

        def ask(rank: int, number: int, lane: str) -> Thread:
            yield "work", float(costs.deduplicate(batches[number])[rank])  # noqa: B023
            for place, message in enumerate(costs.ids(batches[number])):  # noqa: B023
                yield f"meet ids {place} {number} {lane}", float(message[2][rank])

        def ahead(rank: int) -> Thread:
            for number in range(4):
                yield "until", lambda: started[rank] >= number  # type: ignore[misc] # noqa: B023
                if number < 3:
                    yield from ask(rank, number + 1, "ahead")
                    yield "work", float(costs.compare(batches[number], batches[number + 1])[rank])  # noqa: B023
                    marks = costs.marks(batches[number], batches[number + 1])[2]  # noqa: B023
                    yield f"meet marks {number}", float(marks[rank])
                if number:
                    last = batches[number - 1].demand.whole  # noqa: B023
                    yield f"meet give {number}", float(costs.gradients(last)[2][rank])  # noqa: B023
                    yield "work", float(costs.update(last)[rank])  # noqa: B023
                if number < 3:
                    rows = batches[number + 1].demand.whole  # noqa: B023
                    yield "work", float(costs.lookup(rows)[rank])  # noqa: B023
                    yield f"meet bring {number}", float(costs.rows(rows)[2][rank])  # noqa: B023
                finished[rank] = number  # noqa: B023

        def take_input(rank: int) -> Thread:
            for number in range(3):
                yield "until", lambda: started[rank] >= number  # type: ignore[misc] # noqa: B023
                counts = costs.counts(False)[2]  # noqa: B023
                yield f"meet counts of the batch after {number}", float(counts[rank])
                told[rank] = number  # noqa: B023

        threads = {(rank, "main"): main(rank) for rank in range(4)}
        if schedule == "stale":
            threads |= {
                (rank, lane): made(rank)
                for rank in range(4)
                for lane, made in (("ahead", ahead), ("input", take_input))
            }
        loop.run(threads)
        np.testing.assert_allclose(
            np.stack([step.end for step in steps]), ends, rtol=0.01, atol=60 * tick
        )
