"""Histories cut into segments: Recall@10 against the full sequence, and the work of a request that
knows the old segments already.

Quality over seeds 0 to 4 on the users of Online Retail II (UCI Machine Learning Repository; Chen,
2012; CC BY 4.0) with long histories and on generated ones. What is done is kept in --rows and not
done again: `--seeds 0` does one of them.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from freescale.batch import Jagged, SequenceBatch
from freescale.models import Retrieval, split_history
from freescale_bench.common.results import Destination, claim, write
from freescale_bench.common.spread import spread
from freescale_bench.segments import quality

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


def measure_requests(name: str) -> list[dict[str, Any]]:
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
            quality.make_encoder(arm, window, segment, tokens, **shape), num_items=catalogue
        ).eval()
        for arm in ("full", "segments")
    )
    with torch.no_grad():
        memory = cut.compress(old)
        rows = full.encode_items(full.item.weight)
        work: dict[str, Callable[[], Any]] = {
            "full": lambda: full.encode_queries(batch) @ rows.T,
            "segments, compressed before": lambda: cut.encode_queries(recent, memory) @ rows.T,
            "segments, compression": lambda: cut.compress(old),
        }
        operations = {arm: _count_operations(function) for arm, function in work.items()}
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


def _count_operations(function: Any) -> int:
    """Floating-point operations of the matrix products that it runs."""
    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


def find_interval(rows: list[dict[str, Any]], data: str) -> tuple[float, float, float]:
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


def make_claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for data in quality.EPOCHS:
        _, low, high = find_interval(rows, data)
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


def bench_segments(
    data: Path, seeds: Sequence[int] | None, jobs: int, done_rows: Path, to: Destination
) -> None:
    """
    Args:
        seeds: of the models to train now; a result is written when all are done.
        jobs: models trained at a time, one core each.
        done_rows: JSON lines of what is done.
    """
    done_rows.parent.mkdir(parents=True, exist_ok=True)
    rows = (
        [json.loads(line) for line in done_rows.read_text().splitlines()]
        if done_rows.exists()
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
    left = [task for task in asked if task[2] in (seeds or SEEDS) and task not in done]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(quality.measure, *task, data) for task in left]):
            rows.append(future.result())
            print(json.dumps(rows[-1]), flush=True)
            with open(done_rows, "a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    if len(rows) < len(asked):
        return
    rows.sort(key=lambda r: (r["data"], quality.ARMS.index(r["arm"]), r["seed"]))
    intervals = [
        {"part": "interval", "data": name, "arm": "segments"}
        | dict(zip(("mean", "low", "high"), find_interval(rows, name), strict=True))
        for name in quality.EPOCHS
    ]
    torch.set_num_threads(1)
    served = [row for setting in SETTINGS for row in measure_requests(setting)]
    write(
        "segments",
        "cpu",
        f"freescale bench segments quality --data {data.name}",
        [*rows, *intervals, *served],
        make_claims([*rows, *served]),
        dataset={
            "name": data.name,
            "sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
        },
        to=to,
        training={
            "users": {name: len(quality.read_data(name, data).items) for name in quality.EPOCHS},
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
