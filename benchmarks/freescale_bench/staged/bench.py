"""Exposed communication and samples/s of the staged schedule, on hosts with a slow network
(testbeds A and B).

Two hosts, one pinned core each, 200 Mbit/s: serial, TorchRec's TrainPipelineSparseDist, stale (the
control: staged without handling collisions) and staged, over collision rates, over history lengths,
and with hot ids. Compute is real and takes 1.2 times as long as serial's embedding communication,
which is measured first. Arms take turns in one process, with the same batches. The same ledger
records TorchRec's collectives. The tests prove that staged equals serial to the bit.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from typing import Any

from freescale_bench.common.hosts import RATE, Network, open_hosts
from freescale_bench.common.results import Destination, Row, show_claims, write
from freescale_bench.common.torchrec import has_torchrec
from freescale_bench.common.workload import Workload
from freescale_bench.staged.arms import (
    DEDUPLICATED,
    SERIAL,
    STAGED,
    STALE,
    TORCHREC,
    measure,
    measure_peak,
)
from freescale_bench.staged.rows import TENTH, make_claims, summarize

RATES = (0, 5, 10, 25, 50, 100)
LENGTHS = (60, 240)  # in addition to the default
ARMS = [SERIAL, TORCHREC, STALE, STAGED]
COMPUTE = 1.2  # times serial's embedding communication
BASE = Workload(
    rows=250_000, samples=64, median_length=120, sigma=0.0, maximum_length=240, collisions=0.1,
    hidden=(32,), steps=8,
)  # fmt: skip
HOT = replace(BASE, collisions=None, popularity=1.05)
BULKY = replace(BASE, median_length=1200, maximum_length=1200, rows=1_000_000, passes=2, steps=6)
BULKIER = replace(BULKY, median_length=4800, maximum_length=4800, rows=3_000_000, steps=5)


def calibrate(network: Network, workload: Workload) -> Workload:
    """Returns the workload with enough passes to make compute `COMPUTE` times as long as serial's
    embedding communication."""
    few, many = 4, 12
    at: dict[int, dict[str, Any]] = {}
    for passes in (few, many):
        ranks = network.run(measure, replace(workload, passes=passes), [SERIAL], 4, 3)
        at[passes] = summarize(
            [rank[SERIAL] for rank in ranks], ranks[0][SERIAL]["losses"], workload.samples
        )
    wanted = COMPUTE * statistics.fmean(r["exposed_embedding_ms"]["median"] for r in at.values())
    each = (at[many]["compute_ms"] - at[few]["compute_ms"]) / (many - few)
    chosen = replace(workload, passes=max(1, round(few + (wanted - at[few]["compute_ms"]) / each)))
    print(
        f"serial communicates {wanted / COMPUTE:.0f} ms, a pass takes {each:.1f} ms: "
        f"{chosen.passes} passes",
        flush=True,
    )
    return chosen


def measure_arms(
    network: Network,
    configuration: str,
    workload: Workload,
    arms: list[str],
    repetitions: int,
    **about: Any,
) -> list[Row]:
    ranks = network.run(measure, workload, arms, repetitions, 2)
    rows = []
    for arm in arms:
        figures = summarize(
            [rank[arm] for rank in ranks], ranks[0][SERIAL]["losses"], workload.samples * len(ranks)
        )
        rows.append(
            {
                "configuration": configuration,
                **about,
                "arm": arm,
                "passes": workload.passes,
                **figures,
            }
        )
        kinds = "  ".join(
            f"{kind} {figures['exposed_ms'][kind]:6.1f}"
            for kind in ("ids", "rows", "gradients", "counts", "dense")
        )
        print(
            f"{configuration:16s} {arm:32.32s} {figures['samples_per_second']['median']:6.1f} "
            "samples/s "
            f"{figures['step_ms']['median']:7.1f} ms  exposed: {kinds}  embedding "
            f"{figures['exposed_embedding_ms']['median']:6.1f} "
            f"all {figures['exposed_all_ms']['median']:6.1f}  stopped "
            f"{figures['embedding_wait_ms']['median']:6.1f}",
            flush=True,
        )
    return rows


def measure_memory(workload: Workload, repetitions: int) -> list[Row]:
    """Measures the peak memory of each schedule in separate processes. A faster link shortens the
    run; compute is scaled down with it."""
    batch = workload.samples * workload.median_length * (8 + 4 * workload.width)  # ids and rows
    peaks: dict[str, list[list[int]]] = {SERIAL: [], STAGED: []}
    with open_hosts(2, rate="4gbit") as network:
        for _ in range(repetitions):
            for arm, found in peaks.items():
                found.append(network.run(measure_peak, workload, arm))
    rows = []
    for rank in range(2):
        serial, staged = (
            statistics.median(run[rank] for run in peaks[arm]) for arm in (SERIAL, STAGED)
        )
        rows.append(
            {
                "configuration": f"memory, batches of {batch / 1e6:.0f} MB",
                "rank": rank,
                "batch_bytes": batch,
                "serial_peak_bytes": serial,
                "staged_peak_bytes": staged,
                "extra_batches": (staged - serial) / batch,
                "all": {arm: [run[rank] for run in found] for arm, found in peaks.items()},
            }
        )
        print(rows[-1], flush=True)
    return rows


def bench_staged(repetitions: int, quick: bool, to: Destination) -> None:
    repetitions = 4 if quick else repetitions
    arms = [arm for arm in ARMS if arm != TORCHREC or has_torchrec()]
    hand = [DEDUPLICATED] if has_torchrec() else []
    rates = (0, 5, 10, 100) if quick else RATES
    rows: list[Row] = []
    with open_hosts(2) as network:
        base = calibrate(network, BASE)
        for rate in rates:
            about = {
                "sweep": "collisions",
                "collisions": rate,
                "length": base.median_length,
                "ids": "unique",
            }
            workload = replace(base, collisions=rate / 100)
            rows += measure_arms(
                network, f"{rate} % collisions", workload, arms, repetitions, **about
            )
        for length in () if quick else LENGTHS:
            about = {"sweep": "lengths", "collisions": 10, "length": length, "ids": "unique"}
            rows += measure_arms(
                network,
                f"length {length}",
                replace(base, median_length=length),
                arms,
                repetitions,
                **about,
            )
        hot = calibrate(network, HOT)
        about = {"sweep": "ids", "length": hot.median_length, "ids": "hot (Zipf 1.05)"}
        rows += measure_arms(network, "hot ids", hot, [*arms, *hand], repetitions, **about)
    for workload in (BULKY, BULKIER):
        rows += measure_memory(workload, 1 if quick else 3)
    limits = {TENTH: 0.12, "5 % collisions": 0.07}
    found = make_claims(
        rows, limits if quick else limits | {f"length {length}": 0.12 for length in LENGTHS}
    )
    if quick:
        show_claims(found)
        return
    write(
        "staged",
        "hosts",
        f"freescale bench staged --repetitions {repetitions}",
        rows,
        found,
        ("torchrec", "fbgemm-gpu-cpu"),
        to=to,
        workloads={
            "unique ids": asdict(base),
            "hot ids": asdict(hot),
            "memory": [asdict(BULKY), asdict(BULKIER)],
        },
        method=(
            f"2 hosts, one pinned core each, {RATE} each way (tbf); arms in turn in one process, "
            f"{repetitions} turns of 2 steps, the second counted; times are means over ranks, the "
            "step's that of the slower rank"
        ),
    )
