"""The simulator at the paper's setting, to 4,096 GPUs, and useful time under failures."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from freescale.config import SimulateConfig
from freescale.simulate.generated_workload import GeneratedWorkload
from freescale.simulate.inputs import build_cluster, build_workload
from freescale.simulate.run import Plans
from freescale.simulate.simulator import Setting
from freescale.simulate.verdict import ALL, BASE, UNBALANCED
from freescale.simulate.workload import Demand, Rows
from freescale_bench.common.results import Destination, Row, at_least, write
from freescale_bench.simulate.recovery import MEMORY, USUAL, Failures, predict_useful_time

FAILURE_EVERY = 600.0  # seconds
USEFUL = {64: 0.97, 4096: 0.95}  # targets of the useful share of time, by GPUs


class Colliding(GeneratedWorkload):
    """The generated rows with exactly this share of collisions. Changing the distribution of ids
    would also change the number of rows."""

    def __init__(self, samples: int, share: float) -> None:
        super().__init__(samples, collisions=0.1)
        self._share = share

    def compute_demand(self, before: Any, now: Any, after: Any) -> Demand:
        whole = super().compute_demand(before, now, after).whole
        late, shared = (
            Rows.spread(whole.requested * (0.0 if other is None else self._share))
            for other in (before, after)
        )
        return Demand(whole, late, shared)


def scale_histories(cap: int, **more: Any) -> SimulateConfig:
    """Returns a configuration with histories of the same distribution, of at most `cap` events."""
    return SimulateConfig(cap=cap, median=cap / 7, **more)


def simulate_arms(
    config: SimulateConfig, gpus: int, arms: dict[str, Setting]
) -> list[dict[str, Any]]:
    plans = Plans(build_cluster(config, gpus), build_workload(config, gpus), config.steps)
    return [plans.simulate(label, setting).row for label, setting in arms.items()]


SERIAL, BALANCED = Setting(), Setting(balance="greedy")
EVERYTHING = Setting("staged", "greedy", "hostwire")
ARMS = {
    BASE: Setting("sparse_dist", placement="sharded", deduplicate=False),
    f"{BASE}, ids deduplicated": Setting("sparse_dist", placement="sharded"),
    "serial": SERIAL,
    "serial + balancing": BALANCED,
    "serial + hostwire": Setting(transport="hostwire"),
    "staged": Setting("staged"),
    "staged + balancing": Setting("staged", "greedy"),
    UNBALANCED: Setting("staged", transport="hostwire"),
    ALL: EVERYTHING,
}


def simulate_one_sample(config: SimulateConfig, total: int, gpus: int) -> dict[str, Any]:
    """Simulates a fixed global batch on more and more GPUs, until one sample exceeds a rank's
    share."""
    config = replace(config, batch=max(1, total // gpus), steps=6)
    cluster = build_cluster(config, gpus)
    shape, length = (
        cluster.calibration.find_shape(cluster.model),
        build_workload(config, gpus).get_lengths(0).astype(float),
    )
    curve = [shape.forward, shape.backward]
    cost = np.sum([c.quadratic * length**2 + c.linear * length for c in curve], axis=0)
    row = simulate_arms(config, gpus, {"serial + balancing": BALANCED})[0]
    return {
        "figure": "one sample",
        "global_batch": config.batch * gpus,
        "largest_over_mean": float(cost.max() / (cost.sum() / gpus)),
        **row,
    }


def bench_paper(most: int, to: Destination) -> None:
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()

    def add(figure: str, more: dict[str, Any], found: list[dict[str, Any]]) -> None:
        rows.extend({"figure": figure, **more, **row} for row in found)
        print(f"{figure} {more} {time.perf_counter() - begin:.0f} s", flush=True)

    for cap in (1000, 2000, 4000, 8000, 12_000, 16_000, 21_000):
        partitioners = ("none", "greedy", "fixed", "local")
        straggling = {name: Setting(balance=name) for name in partitioners}
        add(
            "straggler by length",
            {"cap": cap},
            simulate_arms(scale_histories(cap, steps=12), 64, straggling),
        )
    for gpus in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        if gpus <= most:
            add(
                "by GPUs",
                {},
                simulate_arms(SimulateConfig(steps=20 if gpus <= 256 else 5), gpus, ARMS),
            )
    for rate in (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0):
        config = SimulateConfig(steps=8)
        plans = Plans(build_cluster(config, 256), Colliding(config.batch * 256, rate), config.steps)
        add(
            "by collisions",
            {"collisions": rate},
            [plans.simulate(ALL, EVERYTHING).row, plans.simulate("serial", SERIAL).row],
        )
    for jitter in (0.01, 0.02):
        add(
            "jitter",
            {"jitter": jitter},
            simulate_arms(
                SimulateConfig(steps=12, jitter=jitter), 64, {"none": SERIAL, "greedy": BALANCED}
            ),
        )
    add("four times the latency", {}, simulate_slow_network())
    for gpus in (64, 128, 256, 512, 1024, 2048, 4096):
        if gpus <= most:
            rows.append(simulate_one_sample(SimulateConfig(), 8192, gpus))
            figures = rows[-1]["largest_over_mean"], rows[-1]["straggler_percent"]
            print("one sample", gpus, *figures, flush=True)
    write(
        "simulate",
        "paper",
        f"freescale bench simulate paper --most {most}",
        rows,
        make_claims(rows),
        to=to,
    )


def simulate_slow_network() -> list[dict[str, Any]]:
    config = SimulateConfig(steps=8)
    plans = Plans(build_cluster(config, 256), build_workload(config, 256), config.steps)
    network = plans.cluster.network
    links = {
        way: replace(getattr(network, way), latency_us=4 * getattr(network, way).latency_us)
        for way in ("near", "far", "pcie")
    }
    slow = replace(network, **links, per_peer_us=4 * network.per_peer_us)
    return [
        plans.simulate(label, setting, network=slow).row
        for label, setting in (("serial", SERIAL), (ALL, EVERYTHING))
    ]


def make_claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def found(figure: str, arm: str, **where: Any) -> dict[str, Any]:
        return next(
            r
            for r in rows
            if r["figure"] == figure
            and r["arm"] == arm
            and all(r[k] == v for k, v in where.items())
        )

    caps = [
        r["straggler_percent"]
        for r in rows
        if r["figure"] == "straggler by length" and r["arm"] == "none" and r["cap"] >= 8000
    ]
    made = [
        at_least(
            "straggler of the baseline, 64 GPUs, histories of 8,000 and more, least",
            20.0,
            min(caps),
            "%",
        )
    ]
    for arm in ("greedy", "fixed"):
        less = found("straggler by length", "none", cap=21_000)["straggler_percent"]
        less /= max(found("straggler by length", arm, cap=21_000)["straggler_percent"], 1e-3)
        made.append(
            at_least(f"straggler at 21,000: times less with {arm}, no jitter", 9.0, less, "times")
        )
    jittered = [
        found("jitter", arm, jitter=0.01)["straggler_percent"] for arm in ("none", "greedy")
    ]
    made.append(
        at_least(
            "the same with greedy and 1 % jitter of compute",
            9.0,
            jittered[0] / jittered[1],
            "times",
        )
    )
    exposed = {
        arm: sum(found("by GPUs", arm, gpus=256)["exposed_ms"].values())
        for arm in (BASE, "serial", ALL)
    }
    for base in (BASE, "serial"):
        less = 100 * (1 - exposed[ALL] / exposed[base])
        made += [
            at_least(
                f"exposed communication at 256 GPUs, all techniques below {base}'s", 90.0, less, "%"
            )
        ]
    sweep = [
        (r["collisions"], sum(r["exposed_ms"].values()))
        for r in rows
        if r["figure"] == "by collisions" and r["arm"] == ALL
    ]
    x, y = np.array(sweep).T
    made.append(
        at_least(
            "exposed communication over the collision rate: correlation with a line",
            0.99,
            float(np.corrcoef(x, y)[0, 1]),
            "",
        )
    )
    return made


def bench_recovery(recovery: str, to: Destination) -> None:
    """Simulates the useful share of a cluster's time under failures, with each part of a failure's
    cost, by source of the restore. `recovery`: these costs."""
    config = SimulateConfig(schedule="staged", steps=5)
    failures = Failures(FAILURE_EVERY, recovery)
    rows: list[Row] = predict_useful_time(config, list(USEFUL), failures)
    for row in rows:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["seconds"].items())
        print(f"{row['gpus']:5d} GPUs, from {row['from']:6s} {row['useful']:.3f} ({parts} s)")
    costs = "" if recovery == USUAL else f", costs {recovery}"
    every = f"useful time at a failure every {FAILURE_EVERY / 60:g} minutes"
    claims = [
        at_least(
            f"{every}, {row['gpus']:,} GPUs{costs}",
            USEFUL[row["gpus"]],
            row["useful"],
            "of the time",
        )
        for row in rows
        if row["from"] == MEMORY
    ]
    command = f"freescale bench simulate recovery --recovery {recovery}"
    write("simulate-recovery", recovery, command, rows, claims, to=to)
