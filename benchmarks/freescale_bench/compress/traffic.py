"""Thresholded communication on hosts with a slow network (testbed A): the time of a step and its
traffic, against dense AllReduce; and an exchange of activations."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from freescale.ledger.merge import merge_step
from freescale_bench.common.hosts import RATE, open_hosts
from freescale_bench.common.results import Destination, claim, write
from freescale_bench.common.spread import spread
from freescale_bench.common.workload import Workload
from freescale_bench.compress.arms import (
    DENSE,
    THRESHOLDED,
    WHOLE,
    exchange_activations,
    measure,
)

ETA = 0.99
# 21 million dense parameters; every sample is one token.
BASE = Workload(
    rows=10_000,
    samples=32,
    median_length=1,
    sigma=0.0,
    maximum_length=1,
    hidden=(4096, 4096, 896),
    steps=8,
    dense_learning_rate=0.01,
)
WORKLOADS = {"32 samples a rank": BASE}
EXCHANGE = "exchange of activations"
ACTIVATION_ROWS, ACTIVATION_WIDTH, ACTIVATION_KEEP = 4096, 200, 10


def summarize(measured: Sequence[Mapping[str, Any]], arm: str) -> dict[str, Any]:
    """Of one arm, from what every rank measured: times of the slower rank, traffic of both."""
    steps = list(zip(*(rank[arm]["records"] for rank in measured), strict=True))  # [steps][ranks]
    figures = [merge_step(records) for records in steps]
    ranks = len(measured)

    def mean(name: str) -> float:
        return statistics.fmean(
            record["counters"].get(name, 0) for records in steps for record in records
        )

    entries = measured[0][arm]["dense_parameters"]
    sent = (
        mean("dense_entries_sent") + entries - mean("dense_entries")
        if arm == THRESHOLDED
        else entries
    )
    # Small tensors, and all of the exact arm, go through AllReduce: a ring passes each entry twice,
    # but for a rank's own part.
    ring = 2 * (ranks - 1) / ranks * (entries - mean("dense_entries"))
    return {
        "step_ms": spread([max(r["end"] - r["begin"] for r in records) / 1e6 for records in steps]),
        "compute_ms": statistics.median(statistics.fmean(f["compute_ms"]) for f in figures),
        "exposed_dense_ms": statistics.median(f["exposed_ms"]["dense"] for f in figures),
        "spans_ms": {
            name: statistics.median(f["spans_ms"].get(name, 0.0) for f in figures)
            for name in figures[0]["spans_ms"]
        },
        "dense_parameters": entries,
        "entries_of_its_gradient_a_rank_sends": sent,
        "entries_that_leave_a_rank": ring + mean("dense_entries_on_wire"),
        "bytes_that_leave_a_rank": statistics.fmean(f["bytes"]["dense"] for f in figures) / ranks,
        "weights_agree_between_ranks": all(rank[arm]["agree"] for rank in measured),
        "last_loss": measured[0][arm]["losses"][-1],
    }


def summarize_exchange(measured: Sequence[Mapping[str, Any]], arm: str) -> dict[str, Any]:
    entries = [e for rank in measured for e in rank[arm]]
    slower = [
        max(pair) for pair in zip(*([e["ms"] for e in rank[arm]] for rank in measured), strict=True)
    ]
    return {
        "exchange_ms": spread(slower),
        "entries_that_leave_a_rank": statistics.fmean(
            e["activation_entries_sent"] for e in entries
        ),
        "bytes_there": statistics.fmean(e["rows"] for e in entries),
        "bytes_back": statistics.fmean(e["gradients"] for e in entries),
    }


def bench_traffic(repetitions: int, to: Destination) -> None:
    rows = []
    with open_hosts(2) as network:
        for name, workload in WORKLOADS.items():
            ranks = network.run(measure, workload, ETA, repetitions, 2)
            for arm in (DENSE, THRESHOLDED):
                rows.append({"configuration": name, "arm": arm, **summarize(ranks, arm)})
                print(json.dumps(rows[-1]), flush=True)
        sizes = (ACTIVATION_ROWS, ACTIVATION_WIDTH, ACTIVATION_KEEP)
        ranks = network.run(exchange_activations, *sizes, repetitions)
        for arm in (WHOLE, THRESHOLDED):
            rows.append({"configuration": EXCHANGE, "arm": arm, **summarize_exchange(ranks, arm)})
            print(json.dumps(rows[-1]), flush=True)
    rows += make_ratios(rows)
    write(
        "compress",
        "hosts",
        f"freescale bench compress hosts --repetitions {repetitions}",
        rows,
        make_claims(rows),
        workloads={name: asdict(workload) for name, workload in WORKLOADS.items()}
        | {EXCHANGE: dict(zip(("rows", "width", "keep"), sizes, strict=True))},
        to=to,
        method=(
            f"2 hosts, a pinned core each, {RATE} each way (tbf); arms in turn in one process, "
            f"{repetitions} turns of 2 steps, the second counted; serial schedule; eta {ETA}, "
            "thresholds reset every 10 steps; means over ranks, times of the slower"
        ),
    )


def divide(rows: Sequence[Mapping[str, Any]], configuration: str, *names: str) -> float:
    """The first arm's numbers over the second's."""
    first, second = (
        sum(row[name] for name in names) for row in rows if row["configuration"] == configuration
    )
    return float(first / second)


def make_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many times less the thresholded arm sends; bytes with their indices."""
    found: list[dict[str, Any]] = []
    for name in WORKLOADS:
        counts = (
            "entries_of_its_gradient_a_rank_sends",
            "entries_that_leave_a_rank",
            "bytes_that_leave_a_rank",
        )
        found.append(
            {"configuration": name, "arm": "times fewer"}
            | {count: divide(rows, name, count) for count in counts}
        )
    both = {
        "entries_that_leave_a_rank": ("entries_that_leave_a_rank",),
        "bytes_there_and_back": ("bytes_there", "bytes_back"),
    }
    found.append(
        {"configuration": EXCHANGE, "arm": "times fewer"}
        | {n: divide(rows, EXCHANGE, *of) for n, of in both.items()}
    )
    return found


def make_claims(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    at = {(row["configuration"], row["arm"]): row for row in rows}
    found = []
    for name in WORKLOADS:
        times = [at[name, arm]["step_ms"]["median"] for arm in (DENSE, THRESHOLDED)]
        less = at[name, "times fewer"]
        found += [
            claim(
                f"dense part, {name}",
                20e6,
                at[name, DENSE]["dense_parameters"],
                "parameters",
                at_least=True,
            ),
            claim(
                f"step below dense AllReduce, {name}",
                37,
                100 * (1 - times[1] / times[0]),
                "%",
                at_least=True,
            ),
        ]
        for text, count in (
            ("entries of its gradient that a rank sends", "entries_of_its_gradient_a_rank_sends"),
            (
                "entries that leave a rank, sums that it sends back counted",
                "entries_that_leave_a_rank",
            ),
        ):
            found.append(
                claim(f"{text}, times fewer, {name}", 100, less[count], "x", at_least=True)
            )
    entries = at[EXCHANGE, "times fewer"]["entries_that_leave_a_rank"]
    return [*found, claim("entries of activations, times fewer", 20, entries, "x", at_least=True)]
