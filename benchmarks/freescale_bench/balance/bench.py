"""Partitioners on heavy-tailed lengths: predicted straggler time, distance to the lower bound,
tokens moved, planning time.

Lengths are log-normal (median 3,000 and 800, sigma 1) with caps of 4,096, 8,192 and 21,000; the L^2
and L terms of the cost are equal at L = 3,072. Everything is predicted from these costs, except the
planning time, which is measured on one core.
"""

from __future__ import annotations

import time

import numpy as np

from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import PARTITIONERS
from freescale.balance.problem import Assignment, Partitioner, Problem, assign
from freescale_bench.common.results import Claim, Destination, Row, at_least, at_most, spread, write
from freescale_bench.common.workload import draw_lengths

MEDIANS, CAPS = (3000, 800), (4096, 8192, 21_000)
BATCHES, RANKS = (8, 32, 128), (16, 64, 256, 1024)
COST = CostModel.balanced_at(3072)


def make_problem(median: int, cap: int, batch: int, ranks: int, seed: int) -> Problem:
    random = np.random.default_rng((seed, median, cap, batch, ranks))
    lengths = draw_lengths(random, median, batch * ranks, cap)
    home = np.repeat(np.arange(ranks), batch)
    return Problem(COST(lengths), lengths, home, ranks, nodes=np.arange(ranks) // 8)


def measure_planning(
    problem: Problem, partitioner: Partitioner, repetitions: int
) -> tuple[Assignment, list[float]]:
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        found = assign(problem, partitioner)
        times.append((time.perf_counter() - begin) * 1e3)
    return found, times


def measure_configuration(
    median: int, cap: int, batch: int, ranks: int, seeds: int, repetitions: int
) -> list[Row]:
    rows = []
    problems = [make_problem(median, cap, batch, ranks, seed) for seed in range(seeds)]
    alone = [float(p.costs.max()) >= float(p.costs.mean()) * batch for p in problems]
    for name in PARTITIONERS:
        found, times = zip(
            *(measure_planning(problem, PARTITIONERS[name], repetitions) for problem in problems),
            strict=True,
        )
        pairs = zip(found, problems, strict=True)
        moved = [100 * a.moved_tokens / p.tokens.sum() for a, p in pairs]
        rows.append(
            {
                "median": median,
                "cap": cap,
                "batch": batch,
                "ranks": ranks,
                "arm": name,
                "one_sample_is_the_bound": any(alone),
                "straggler_percent": float(np.mean([a.straggler_percent for a in found])),
                "imbalance": float(np.mean([a.imbalance for a in found])),
                "above_bound_percent": float(np.max([a.above_bound for a in found])) * 100,
                "moved_percent": float(np.mean(moved)),
                "planning_ms": spread([t for part in times for t in part]),
            }
        )
    return rows


def make_claims(rows: list[Row]) -> list[Claim]:
    def pick(arm: str, **wanted: object) -> list[Row]:
        return [r for r in rows if r["arm"] == arm and all(r[k] == v for k, v in wanted.items())]

    def worst(picked: list[Row], key: str) -> float:
        return float(max(r[key] for r in picked))

    free = {"one_sample_is_the_bound": False}
    large = [r for r in pick("greedy", **free) if r["batch"] >= 32]
    near = [r for r in pick("local", **free) if r["batch"] >= 32]
    shape = {"median": 3000, "cap": 21_000, "batch": 128, "ranks": 64}
    none, zigzag = pick("none", **shape)[0], pick("fixed", **shape)[0]
    heavy = {"cap": 21_000, "median": 800, "batch": 128}
    claims = [
        at_most(
            "greedy above the bound, 32 samples a rank and more (worst)",
            0.5,
            worst(large, "above_bound_percent"),
            "%",
        ),
        at_most(
            "greedy above the bound, 8 samples a rank (worst)",
            1.0,
            worst(pick("greedy", batch=8, **free), "above_bound_percent"),
            "%",
        ),
        at_most(
            "local above the bound, 32 and more (worst)",
            1.0,
            worst(near, "above_bound_percent"),
            "%",
        ),
        at_most("local: tokens moved, 32 and more (most)", 15.0, worst(near, "moved_percent"), "%"),
        at_least(
            "fixed: times less straggler than none at 21,000/128/64",
            9.0,
            none["straggler_percent"] / zigzag["straggler_percent"],
            "x",
        ),
        at_least(
            "Karmarkar-Karp's largest load over greedy's on heavy tails (800/21,000/128, least "
            "over ranks)",
            1.0,
            min(
                k["imbalance"] / g["imbalance"]
                for k, g in zip(
                    pick("karmarkar_karp", **heavy), pick("greedy", **heavy), strict=True
                )
            ),
            "x",
        ),
    ]
    for arm, ranks, target in (
        ("fixed", 256, 5.0),
        ("greedy", 256, 30.0),
        ("fixed", 1024, 50.0),
        ("greedy", 1024, 300.0),
    ):
        slowest = max(r["planning_ms"]["median"] for r in pick(arm, batch=128, ranks=ranks))
        claims.append(
            at_most(
                f"{arm}: planning {ranks} ranks x 128 on one core (slowest median)",
                target,
                slowest,
                "ms",
            )
        )
    return claims


def bench_predicted(seeds: int, repetitions: int, to: Destination) -> None:
    """Runs every partitioner over medians, caps, batches and ranks. Loads are predicted by the cost
    model; planning times are measured."""
    rows = []
    for median in MEDIANS:
        for cap in CAPS:
            for batch in BATCHES:
                for ranks in RANKS:
                    rows += measure_configuration(median, cap, batch, ranks, seeds, repetitions)
            print(f"median {median}, cap {cap}: done", flush=True)
    write(
        "balance",
        "cpu",
        f"freescale bench balance --seeds {seeds} --repetitions {repetitions}",
        rows,
        make_claims(rows),
        to=to,
        cost={"equal_at": 3072},
        predicted="all but planning_ms",
    )
