"""What thresholded communication does to quality: HR@10 of every arm with the same seeds, on a file
and on generated histories. Each run's result is kept in a folder, so that the benchmark can be
interrupted and called again; the result is written when all are there. Another protocol in
quality_ranks.py wants another folder. Online Retail II: UCI Machine Learning Repository; Chen,
2012; CC BY 4.0."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from freescale_bench.common.repository import package_path
from freescale_bench.common.results import Destination, claim, write
from freescale_bench.compress.quality_ranks import (
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
)

SEEDS = range(5)
GENERATED: dict[str, Any] = {"users": 6000, "items": 3000, "median": 40.0, "cap": 200, "seed": 0}
STUDENT = 2.776  # 97.5 % of Student's t with 4 degrees of freedom


def make_datasets(data: Path, folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Name -> the prepared histories, and what identifies them."""
    from freescale.data.ingest.prepare import prepare
    from freescale.data.synthetic.generate import generate

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
            {"name": "freescale.data.synthetic.generate.generate", "options": GENERATED},
        ),
    }


# histories, data set, arm, seed, out file, changes of settings
Run = tuple[str, str, str, int, str, dict[str, Any]]


def bench_quality(
    data: Path, folder: Path, most: int | None, parallel: int, to: Destination
) -> None:
    """
    Args:
        folder: of the runs' results.
        most: runs to make now, at most.
        parallel: runs at a time, on two cores each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = make_datasets(data, folder)
    wanted = [(name, seed, arm) for seed in SEEDS for name in known for arm in ARMS]
    missing = [run for run in wanted if not find_result(folder, *run).exists()]
    now: list[Run] = [
        (str(known[name][0]), name, arm, seed, str(find_result(folder, name, seed, arm)), {})
        for name, seed, arm in missing[:most]
    ]
    if now:
        train_runs(now, folder, parallel)
    if most is not None and len(missing) > most:
        print(f"{len(missing) - most} runs are left: call it again")
        return
    rows = [
        {
            "dataset": name,
            "seed": seed,
            "arm": arm,
            **json.loads(find_result(folder, name, seed, arm).read_text()),
        }
        for name, seed, arm in wanted
    ]
    write(
        "compress-quality",
        "cpu",
        f"freescale bench compress quality --data {data.name} --run-folder FOLDER",
        rows,
        make_claims(rows, list(known)),
        to=to,
        datasets={name: about for name, (_, about) in known.items()},
        model={**SHAPE, **SIZES, "wide": WIDE, "kept_of_wide": KEEP},
        training={
            name: {**options, "dropout": DROPOUT[name], "reset_every": EVERY}
            for name, options in TRAINING.items()
        },
        method=(
            "2 ranks, serial schedule; same seed, same data order, first weights and negatives in "
            "every arm; weights of the epoch with the best validation HR@10, evaluated on the test "
            "part once; differences are relative and paired by seed, with Student's 95 % interval "
            "over 5 seeds"
        ),
    )


def find_result(folder: Path, name: str, seed: int, arm: str) -> Path:
    return folder / f"{name}-{seed}-{ARMS.index(arm)}.json"


def train_runs(runs: Sequence[Run], folder: Path, parallel: int) -> None:
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
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "freescale_bench.compress.quality_ranks",
        str(listed),
    ]
    subprocess.run(
        command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": package_path()}
    )


def find_interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval of the mean."""
    mean = statistics.fmean(differences)
    half = STUDENT * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def make_claims(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    at = {(row["dataset"], row["arm"], row["seed"]): row for row in rows}
    found = []
    for name in names:
        for arm in (GRADIENTS, ACTIVATIONS):
            pairs = [
                (at[name, arm, seed]["hr@10"], at[name, EXACT, seed]["hr@10"]) for seed in SEEDS
            ]
            mean, low, high = (
                round(100 * value, 2) for value in find_interval([(a - b) / b for a, b in pairs])
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
