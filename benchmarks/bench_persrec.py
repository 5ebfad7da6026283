"""Histories cut into segments: Recall@10 against the full sequence, and the work of a request that
knows the old segments already.

    .venv/bin/python benchmarks/bench_persrec.py --data online_retail_ii.parquet

Quality over seeds 0 to 4 on the users of Online Retail II (UCI Machine Learning Repository; Chen,
2012; CC BY
4.0) with long histories and on generated ones. What is done is kept in --rows and not done again: `--seeds 0` does one of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent))

from results import claim, spread, write  # noqa: E402

import persrec_quality as quality  # noqa: E402  # isort: skip
from freescale.batch import Jagged, SequenceBatch  # noqa: E402
from freescale.models import Retrieval, split_history  # noqa: E402

WITNESSES = (1,)  # seeds of the arm `recent`
SEEDS, STUDENT = (0, 1, 2, 3, 4), 2.776  # t of 95 % with 4 degrees of freedom
REPETITIONS = 20
WIDE: dict[str, Any] = dict(
    width=128, layers=4, heads=4, dropout=0.0, position_bias=True, time_bias=True
)
SMALL = quality.WINDOW, quality.SEGMENT, quality.TOKENS, 4631, quality.SHAPE | {"dropout": 0.0}
# window, segment, tokens, catalogue, shape; requests at a time
SETTINGS: dict[str, tuple[tuple[int, int, int, int, dict[str, Any]], int]] = {
    "160 = 128 + 32 events, 32 at a time": (SMALL, 32),
    "160 = 128 + 32 events, 128 at a time": (SMALL, 128),
    "1,280 = 1,024 + 256 events, 4 at a time": ((1280, 1024, 4, 4631, WIDE), 4),
}


def requests(name: str) -> list[dict[str, Any]]:
    """Rows of the full sequence, of a request after compression, and of the compression itself,
    which happens once."""
    (window, segment, tokens, catalogue, shape), count = SETTINGS[name]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((count,), window)
    items = torch.randint(0, catalogue, (count * window,), generator=generator)
    times = torch.randint(0, 9999, (count * window,), generator=generator).cumsum(0)
    batch = SequenceBatch(
        {"history": Jagged(items, lengths), "timestamps": Jagged(times, lengths)},
        keys=torch.arange(count),
    )
    old, recent = split_history(batch, segment)
    torch.manual_seed(0)
    full, cut = (
        Retrieval(
            quality.encoder_of(arm, window, segment, tokens, **shape), num_items=catalogue
        ).eval()
        for arm in ("full", "segments")
    )
    with torch.no_grad():
        memory = cut.compress(old)
        rows = full.encode_items(full.item.weight)
        work = {
            "full": lambda: full.encode_queries(batch) @ rows.T,
            "segments, compressed before": lambda: cut.encode_queries(recent, memory) @ rows.T,
            "segments, compression": lambda: cut.compress(old),
        }
        operations = {arm: _counted(function) for arm, function in work.items()}
        seconds: dict[str, list[float]] = {arm: [] for arm in work}
        for _ in range(REPETITIONS):  # in turns
            for arm, function in work.items():
                begin = time.perf_counter()
                function()
                seconds[arm].append(time.perf_counter() - begin)
    return [
        {
            "part": "requests",
            "setting": name,
            "arm": arm,
            "requests": count,
            "operations": operations[arm] / count,
        }
        | {"ms": spread([1e3 * t / count for t in seconds[arm]])}
        for arm in work
    ]


def _counted(function: Any) -> int:
    """Floating-point operations of the matrix products that it runs."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def interval(rows: list[dict[str, Any]], data: str) -> tuple[float, float, float]:
    """Relative difference of the segments' recall from the full sequence's of the same seed, in
    percent: mean, 95 % interval."""
    found = {
        (r["arm"], r["seed"]): r["recall@10"]
        for r in rows
        if r["part"] == "quality" and r["data"] == data
    }
    differences = np.array(
        [100 * (found["segments", seed] / found["full", seed] - 1) for seed in SEEDS]
    )
    half = STUDENT * differences.std(ddof=1) / len(SEEDS) ** 0.5
    return (
        float(differences.mean()),
        float(differences.mean() - half),
        float(differences.mean() + half),
    )


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for data in quality.EPOCHS:
        _, low, high = interval(rows, data)
        what = (
            f"{data}: relative difference of Recall@10 from the full sequence, 5 seeds, 95 % "
            "interval"
        )
        made.append(claim(f"{what}, lower end (excludes -5 %)", -5.0, low, "%", at_least=True))
        made.append(
            claim(f"{what}, upper end (includes 0 or is above)", 0.0, high, "%", at_least=True)
        )
    for setting in SETTINGS:
        of = {r["arm"]: r for r in rows if r["part"] == "requests" and r["setting"] == setting}
        full, cut = of["full"], of["segments, compressed before"]
        what = (
            f"work of a request, {setting}: the full sequence over recent events and "
            "remembered tokens"
        )
        made.append(
            claim(
                f"{what}, operations",
                4.0,
                full["operations"] / cut["operations"],
                "x",
                at_least=True,
            )
        )
        made.append(
            claim(
                f"{what}, time", 4.0, full["ms"]["median"] / cut["ms"]["median"], "x", at_least=True
            )
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help=("models trained at a time, one core each")
    )
    parser.add_argument(
        "--rows",
        type=Path,
        default=Path("runs/persrec-rows.jsonl"),
        help="what is done; taken up again",
    )
    options = parser.parse_args()
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    rows = (
        [json.loads(line) for line in options.rows.read_text().splitlines()]
        if options.rows.exists()
        else []
    )
    done = {(r["arm"], r["data"], r["seed"]) for r in rows}
    asked = [
        (a, d, s)
        for s in SEEDS
        for d in quality.EPOCHS
        for a in quality.ARMS
        if a != "recent" or s in WITNESSES
    ]
    left = [task for task in asked if task[2] in options.seeds and task not in done]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed(
            [pool.submit(quality.measured, *task, options.data) for task in left]
        ):
            rows.append(future.result())
            print(json.dumps(rows[-1]), flush=True)
            with open(options.rows, "a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    if len(rows) < len(asked):
        return
    rows.sort(key=lambda r: (r["data"], quality.ARMS.index(r["arm"]), r["seed"]))
    intervals = [
        {"part": "interval", "data": data, "arm": "segments"}
        | dict(zip(("mean", "low", "high"), interval(rows, data), strict=True))
        for data in quality.EPOCHS
    ]
    torch.set_num_threads(1)
    served = [row for setting in SETTINGS for row in requests(setting)]
    write(
        "persrec",
        "cpu",
        f".venv/bin/python benchmarks/bench_persrec.py --data {options.data.name}",
        [*rows, *intervals, *served],
        claims([*rows, *served]),
        dataset={
            "name": options.data.name,
            "sha256": hashlib.sha256(options.data.read_bytes()).hexdigest(),
        },
        training={
            "users": {
                name: len(quality.data_of(name, options.data).items) for name in quality.EPOCHS
            },
            "held out of each": quality.HELD,
            "window": quality.WINDOW,
            "segment": quality.SEGMENT,
            "tokens": quality.TOKENS,
            "epochs": quality.EPOCHS,
            "token options": quality.TOKEN_OPTIONS,
            "shape": quality.SHAPE,
            "seconds": round(sum(row["seconds"] for row in rows)),
        },
    )


if __name__ == "__main__":
    main()
