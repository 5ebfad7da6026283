"""Thresholded communication: the time of a step on hosts with a slow network (testbed A), and what
it does to quality.

    .venv/bin/python benchmarks/bench_compress.py hosts
    .venv/bin/python benchmarks/bench_compress.py quality --data online_retail_ii.parquet --folder FOLDER

`hosts` needs root and iproute2. `quality` trains every arm with the same seeds, on the file and on
generated histories; each run's result is kept in the folder, so that it can be interrupted and
called again (`--runs N`: at most so many now; `--parallel N`: so many at a time, on two cores
each); what they say is written when all are there. Another protocol in compress_quality.py wants
another folder. Online Retail II: UCI Machine Learning Repository; Chen, 2012; CC BY 4.0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "peer")]

from compress_arms import DENSE, THRESHOLDED, WHOLE  # noqa: E402
from compress_quality import (
    ACTIVATIONS,
    ARMS,
    DROPOUT,
    EVERY,
    EXACT,
    GRADIENTS,
    KEEP,
    SHAPE,
    SIZES,
    TRAINING,
    WIDE,
)  # noqa: E402
from hosts import RATE, hosts  # noqa: E402
from results import claim, commit, spread, write  # noqa: E402
from workload import Workload  # noqa: E402

from freescale.ledger.merge import merge_step  # noqa: E402

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
SEEDS = range(5)
GENERATED = {"users": 6000, "items": 3000, "median": 40.0, "cap": 200, "seed": 0}
STUDENT = 2.776  # 97.5 % of Student's t with 4 degrees of freedom


# ---- hosts


def row(measured: Sequence[Mapping], arm: str) -> dict[str, Any]:
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


def exchange_row(measured: Sequence[Mapping], arm: str) -> dict[str, Any]:
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


def on_hosts(repetitions: int) -> None:
    rows = []
    with hosts(2) as network:
        for name, workload in WORKLOADS.items():
            ranks = network.run("compress_arms:measure", workload, ETA, repetitions, 2)
            for arm in (DENSE, THRESHOLDED):
                rows.append({"configuration": name, "arm": arm, **row(ranks, arm)})
                print(json.dumps(rows[-1]), flush=True)
        sizes = (ACTIVATION_ROWS, ACTIVATION_WIDTH, ACTIVATION_KEEP)
        ranks = network.run("compress_arms:activations", *sizes, repetitions)
        for arm in (WHOLE, THRESHOLDED):
            rows.append({"configuration": EXCHANGE, "arm": arm, **exchange_row(ranks, arm)})
            print(json.dumps(rows[-1]), flush=True)
    rows += ratios(rows)
    write(
        "compress",
        "hosts",
        f".venv/bin/python benchmarks/bench_compress.py hosts --repetitions {repetitions}",
        rows,
        host_claims(rows),
        workloads={name: asdict(workload) for name, workload in WORKLOADS.items()}
        | {EXCHANGE: dict(zip(("rows", "width", "keep"), sizes, strict=True))},
        method=f"2 hosts, a pinned core each, {RATE} each way (tbf); arms in turn in one process, {repetitions} turns of 2 steps, "
        f"the second counted; serial schedule; eta {ETA}, thresholds reset every 10 steps; means "
        "over ranks, times of the slower",
    )


def fewer(rows: Sequence[Mapping], configuration: str, *names: str) -> float:
    """The first arm's numbers over the second's."""
    first, second = (
        sum(row[name] for name in names) for row in rows if row["configuration"] == configuration
    )
    return first / second


def ratios(rows: Sequence[Mapping]) -> list[dict[str, Any]]:
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
            | {count: fewer(rows, name, count) for count in counts}
        )
    both = {
        "entries_that_leave_a_rank": ("entries_that_leave_a_rank",),
        "bytes_there_and_back": ("bytes_there", "bytes_back"),
    }
    found.append(
        {"configuration": EXCHANGE, "arm": "times fewer"}
        | {n: fewer(rows, EXCHANGE, *of) for n, of in both.items()}
    )
    return found


def host_claims(rows: Sequence[Mapping]) -> list[dict[str, Any]]:
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


# ---- quality


def datasets(data: Path, folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Name -> the prepared histories, and what identifies them."""
    from freescale.data.prepare import prepare
    from freescale.data.synthetic import generate

    generated = folder / "generated.parquet"
    if not generated.exists():
        generate(generated, **GENERATED)
    return {
        "online_retail_ii": (
            prepare(str(data), folder / "cache", "auto", None, None),
            {"name": data.name, "sha256": hashlib.sha256(data.read_bytes()).hexdigest()},
        ),
        "generated": (
            generated,
            {"name": "freescale.data.synthetic.generate", "options": GENERATED},
        ),
    }


# histories, data set, arm, seed, out file, changes of settings
Run = tuple[str, str, str, int, str, dict[str, Any]]


def quality(data: Path, folder: Path, most: int | None, parallel: int, measured: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = datasets(data, folder)
    wanted = [(name, seed, arm) for seed in SEEDS for name in known for arm in ARMS]
    missing = [run for run in wanted if not result_file(folder, *run).exists()]
    now: list[Run] = [
        (str(known[name][0]), name, arm, seed, str(result_file(folder, name, seed, arm)), {})
        for name, seed, arm in missing[:most]
    ]
    if now:
        train(now, folder, parallel)
    if most is not None and len(missing) > most:
        print(f"{len(missing) - most} runs are left: call it again")
        return
    rows = [
        {
            "dataset": name,
            "seed": seed,
            "arm": arm,
            **json.loads(result_file(folder, name, seed, arm).read_text()),
        }
        for name, seed, arm in wanted
    ]
    write(
        "compress-quality",
        "cpu",
        f".venv/bin/python benchmarks/bench_compress.py quality --data {data.name} --folder FOLDER",
        rows,
        quality_claims(rows, list(known)),
        commit=measured,
        datasets={name: about for name, (_, about) in known.items()},
        model={**SHAPE, **SIZES, "wide": WIDE, "kept_of_wide": KEEP},
        training={
            name: {**options, "dropout": DROPOUT[name], "reset_every": EVERY}
            for name, options in TRAINING.items()
        },
        method="2 ranks, serial schedule; same seed, same data order, first weights and negatives in every arm; weights of the "
        "epoch with the best validation HR@10, evaluated on the test part once; differences are "
        "relative and paired by seed, with "
        "Student's 95 % interval over 5 seeds",
    )


def result_file(folder: Path, name: str, seed: int, arm: str) -> Path:
    return folder / f"{name}-{seed}-{ARMS.index(arm)}.json"


def train(runs: Sequence[Run], folder: Path, parallel: int) -> None:
    """One after another on two ranks, which stay: starting them takes as long as a short run. Or so
    many at a time, each on ranks of its own, the longest first."""
    if parallel == 1:
        return train_on_ranks(runs, folder / "runs.txt")
    longest = sorted(runs, key=lambda run: -(TRAINING[run[1]] | run[5])["epochs"])
    with ThreadPoolExecutor(parallel) as pool:
        started = [
            pool.submit(train_on_ranks, [run], folder / f"run-{place}.txt")
            for place, run in enumerate(longest)
        ]
        try:
            for done, one in enumerate(as_completed(started), start=1):
                one.result()
                print(f"{done} of {len(runs)} runs are done", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def train_on_ranks(runs: Sequence[Run], listed: Path) -> None:
    listed.write_text(json.dumps(runs), encoding="utf-8")
    script = str(Path(__file__).with_name("compress_quality.py"))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        script,
        str(listed),
    ]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval of the mean."""
    mean = statistics.fmean(differences)
    half = STUDENT * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def quality_claims(rows: Sequence[Mapping], names: Sequence[str]) -> list[dict[str, Any]]:
    at = {(row["dataset"], row["arm"], row["seed"]): row for row in rows}
    found = []
    for name in names:
        for arm in (GRADIENTS, ACTIVATIONS):
            pairs = [
                (at[name, arm, seed]["hr@10"], at[name, EXACT, seed]["hr@10"]) for seed in SEEDS
            ]
            mean, low, high = (
                round(100 * value, 2) for value in interval([(a - b) / b for a, b in pairs])
            )
            about = f"HR@10 of {arm} against exact, relative, {name}"
            found += [
                {
                    "claim": f"95 % interval includes 0: {about}",
                    "asked": 0,
                    "measured": [low, high],
                    "unit": "%",
                    "mean": mean,
                }
                | {"holds": low <= 0 <= high},
                {
                    "claim": f"95 % interval excludes -5 %: {about}",
                    "asked": -5,
                    "measured": low,
                    "unit": "%",
                    "holds": low > -5,
                },
            ]
        runs = [at[name, GRADIENTS, seed] for seed in SEEDS]
        times = sum(r["dense_entries"] for r in runs) / sum(r["dense_entries_sent"] for r in runs)
        about = f"entries of thresholded tensors that are sent, whole run, fewer, {name}"
        found.append(claim(about, 100, times, "x", at_least=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("hosts", help="time of a step and traffic")
    part.add_argument("--repetitions", type=int, default=20)
    part = parts.add_parser("quality", help="HR@10 with and without")
    part.add_argument("--data", type=Path, required=True)
    part.add_argument("--folder", type=Path, required=True, help="for the runs' results")
    part.add_argument("--runs", type=int, help="at most so many now")
    part.add_argument("--parallel", type=int, default=1, help="so many at a time")
    part.add_argument(
        "--commit", help=("of the tree that is measured, where it was copied without its history")
    )
    options = parser.parse_args()
    if options.part == "hosts":
        on_hosts(options.repetitions)
    else:
        quality(
            options.data, options.folder, options.runs, options.parallel, options.commit or commit()
        )


if __name__ == "__main__":
    main()
