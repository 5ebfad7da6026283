"""What the workload itself does to a step, before any machine does: sparsity, straggler % and
collision % over its shape.

Lengths are the generator's: log-normal, median 3,000, sigma 1, cut at the longest allowed. Every
sweep changes one of three: longest 21,000, 128 samples a rank, 64 ranks. Sparsity is counted on the
lengths drawn (1 - tokens / (samples * longest) of a rank's batch, mean over ranks). Straggler % is
predicted: from the costs of an HSTU of 8 layers, 512 wide, as the balancer has them. Collision % is
the share of a batch's requests whose row the batch before reads too: expected, from the popularity
of every item (nothing binds items to batches), and counted on ids that the generator draws, for
sizes that can be drawn here.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import PARTITIONERS
from freescale.balance.problem import Problem, assign
from freescale.data.synthetic.draws import SyntheticSource
from freescale.data.synthetic.lengths import LengthDistribution
from freescale.simulate.generated_workload import GeneratedWorkload
from freescale_bench.common.results import Destination, Row, claim, write
from freescale_bench.common.spread import spread

MEDIAN = 3000
USUAL = {"cap": 21_000, "batch": 128, "ranks": 64}
SWEEPS = {
    "cap": (1000, 2000, 4000, 8000, 12_000, 16_000, 21_000),
    "batch": (8, 16, 32, 64, 128, 256, 512),
    "ranks": (8, 16, 32, 64, 128, 256, 512, 1024),
}
ARMS = ("none", "fixed", "greedy")
STEPS = 20  # global batches of a configuration
COST = CostModel.of_hstu(width=512, layers=8, heads=4, d_qk=128, d_v=128)

# Collisions: of a catalogue of 100 million with Zipf popularity 1, again one thing changed at a
# time.
CATALOGUE = {"items": 100_000_000, "popularity": 1.0, "ranks": 64, "cap": 21_000}
CATALOGUES: dict[str, tuple[float, ...]] = {
    "ranks": (8, 16, 32, 64, 128, 256, 512, 1024),
    "items": (100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000),
    "popularity": (0.0, 0.25, 0.5, 0.75, 1.0, 1.25),
    "cap": (1000, 2000, 4000, 8000, 21_000),
}
# small enough to draw
DRAWN = {
    "items": 1_000_000,
    "popularity": 1.0,
    "ranks": 8,
    "batch": 8,
    "cap": 2000,
    "median": 2000 / 7,
}


def measure_shape(sweep: str, value: int) -> list[dict[str, Any]]:
    """Sparsity and predicted straggler % of one configuration, by partitioner."""
    at = USUAL | {sweep: value}
    source = GeneratedWorkload(
        at["batch"] * at["ranks"], median=MEDIAN, cap=at["cap"], items=1000, collisions=None
    )
    home = np.repeat(np.arange(at["ranks"]), at["batch"])
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for step in range(STEPS):
        lengths = source.get_lengths(step)
        problem = Problem(COST(lengths), lengths, home, at["ranks"])
        for arm in ARMS:
            given = assign(problem, PARTITIONERS[arm])
            found[arm].append(
                (
                    100 * measure_sparsity(lengths, given.rank_of, at["ranks"]),
                    given.straggler_percent,
                )
            )
    return [
        {"figure": "shape", "sweep": sweep, **at, "arm": arm}
        | {
            "sparsity_percent": spread([one for one, _ in pairs]),
            "straggler_percent": spread([one for _, one in pairs]),
        }
        for arm, pairs in found.items()
    ]


def measure_sparsity(lengths: np.ndarray, rank_of: np.ndarray, ranks: int) -> float:
    """Of each rank's batch, mean over ranks."""
    tokens, samples = np.bincount(rank_of, lengths, ranks), np.bincount(rank_of, minlength=ranks)
    longest = np.zeros(ranks)
    np.maximum.at(longest, rank_of, lengths)
    return float(np.mean(1 - tokens / np.maximum(samples * longest, 1)))


def expected_percent(source: GeneratedWorkload, rank_of: np.ndarray, ranks: int) -> float:
    """Of a step's requests, those whose row the step before reads too."""
    before, now = (source.find_requests(step, rank_of, ranks) for step in (0, 1))
    demand = source.compute_demand(before, now, None)
    return 100 * float(demand.late.requested.sum() / demand.whole.requested.sum())


def expect_collisions(sweep: str, value: float) -> dict[str, Any]:
    at = CATALOGUE | {sweep: value}
    cap, ranks, batch = int(at["cap"]), int(at["ranks"]), USUAL["batch"]
    source = GeneratedWorkload(
        batch * ranks,
        median=MEDIAN,
        cap=cap,
        items=int(at["items"]),
        popularity=at["popularity"],
        collisions=None,
    )
    rank_of = np.repeat(np.arange(ranks), batch)
    share = expected_percent(source, rank_of, ranks)
    return {
        "figure": "collisions",
        "sweep": sweep,
        **at,
        "batch": batch,
        "arm": "expected",
        "collision_percent": share,
    }


def draw_collisions(ranks: int) -> list[dict[str, Any]]:
    """The same small configuration twice: ids drawn and compared, and expected."""
    at = DRAWN | {"ranks": ranks}
    samples, cap, median = int(at["batch"]) * ranks, int(at["cap"]), at["median"]
    lengths = LengthDistribution.from_options("lognormal", median, 1.0, 0.0, cap)
    source = SyntheticSource(
        2 * samples, int(at["items"]), lengths, at["popularity"], samples, ranks, 0
    )
    before, now = (
        source.list_requests(batch, source.choose_items(batch, None))
        for batch in map(source.draw_batch, (0, 1))
    )
    counted = 100 * float(np.isin(now, before).mean())
    model = GeneratedWorkload(
        samples,
        median=median,
        cap=cap,
        items=int(at["items"]),
        popularity=at["popularity"],
        collisions=None,
    )
    rank_of = np.arange(samples) * ranks // samples
    share = expected_percent(model, rank_of, ranks)
    row = {"figure": "collisions", "sweep": "drawn", **at}
    return [
        row | {"arm": "drawn", "collision_percent": counted},
        row | {"arm": "expected", "collision_percent": share},
    ]


def make_claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    longest = [
        r for r in rows if r["figure"] == "shape" and r["sweep"] == "cap" and r["cap"] == 21_000
    ]
    at = {r["arm"]: r["straggler_percent"]["median"] for r in longest}
    small = [r for r in rows if r["sweep"] == "drawn"]
    both = [
        [r["collision_percent"] for r in small if r["arm"] == arm] for arm in ("drawn", "expected")
    ]
    off = max(abs(a - b) for a, b in zip(*both, strict=True))
    return [
        claim(
            "straggler without balancing at 21,000, 128 samples, 64 ranks",
            20.0,
            at["none"],
            "%",
            at_least=True,
        ),
        claim(
            "the same: times less with fixed (the paper's zig-zag)",
            9.0,
            at["none"] / at["fixed"],
            "times",
            at_least=True,
        ),
        claim(
            "collisions drawn against expected, largest distance",
            2.0,
            off,
            "points",
            at_least=False,
        ),
    ]


def bench_workload(to: Destination) -> None:
    begin = time.perf_counter()
    rows: list[Row] = []
    for sweep, values in SWEEPS.items():
        for value in values:
            rows += measure_shape(sweep, value)
        print(f"shape over {sweep}: {time.perf_counter() - begin:.0f} s", flush=True)
    for sweep, sizes in CATALOGUES.items():
        rows += [expect_collisions(sweep, size) for size in sizes]
        print(f"collisions over {sweep}: {time.perf_counter() - begin:.0f} s", flush=True)
    for ranks in (2, 4, 8, 16, 32):
        rows += draw_collisions(ranks)
    about = (
        "straggler_percent (by the cost model) and collision_percent of the arm `expected`; the "
        "rest is counted on what was drawn"
    )
    claims = make_claims(rows)
    write("workload", "cpu", "freescale bench workload", rows, claims, to=to, predicted=about)
