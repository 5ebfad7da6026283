"""Settings of quality.py for generated histories, chosen without its test: other users
and items (draw 1000 + seed), seeds 100 and on.

The chances that draw the events are known, so Recall@10 is given twice: of the held-out events, and
its expectation, which has no noise of the draws. The expectation right before the first segment
ends, where all arms see the same, tells whether it is the tokens that lose.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import numpy as np
import torch

from freescale_bench.common.results import Destination, write
from freescale_bench.segments import quality

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "segments": ("segments", {}),
    "pooled": ("segments", dict(segment_pooling=True)),
    "weighed": ("segments", dict(segment_weight=32.0)),
    "pooled, weighed": ("segments", dict(segment_pooling=True, segment_weight=32.0)),
    "pooled, weighed 5.66": ("segments", dict(segment_pooling=True, segment_weight=5.66)),
}


@torch.no_grad()
def expect_recall(
    arm: str, model: Any, data: quality.Data, chances: np.ndarray, at: int = 10
) -> tuple[float, float]:
    """Of the last HELD events, and of the last one of the first segment."""
    rows, sums = model.encode_items(model.item.weight), np.zeros(2)
    for users in quality.split_batches(np.arange(len(data.items))):
        batch = quality.make_batch(
            arm,
            data.items[users, quality.HELD :],
            data.times[users, quality.HELD :],
            None,
            data.catalogue,
        )
        outputs = model.encode_items(model.encode_history(batch)).view(
            len(users), quality.WINDOW, -1
        )
        for i, part in enumerate(
            (outputs[:, -quality.HELD :], outputs[:, quality.SEGMENT - 1 : quality.SEGMENT])
        ):
            # [users, events * at]
            best = (part @ rows.T).topk(at, dim=-1).indices.flatten(1).numpy()
            sums[i] += np.take_along_axis(chances[users], best, axis=1).sum() / part.shape[1]
    return float(sums[0] / len(data.items)), float(sums[1] / len(data.items))


def measure(name: str, seed: int, epochs: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    arm, options = ARMS[name]
    data = quality.generate_data(epochs, draw=1000 + seed)
    chances = quality.draw_chances(np.random.default_rng(1000 + seed))
    chances /= chances.sum(axis=1, keepdims=True)
    model, seconds = quality.train(arm, data, seed, options)
    at_end, at_segment = expect_recall(arm, model, data, chances)
    found = {
        "recall@10": quality.measure_recall(arm, model, data),
        "expected": at_end,
        "expected at the segment's end": at_segment,
    }
    return {"arm": name, "seed": seed, "epochs": epochs} | found | {"seconds": round(seconds)}


def bench_validation(
    arms: Sequence[str] | None,
    seeds: Sequence[int] | None,
    every: Sequence[int],
    jobs: int,
    to: Destination,
) -> None:
    """12 models by default, 12 minutes on two cores. `every`: numbers of epochs."""
    arms = arms or ("full", "segments", "pooled", "pooled, weighed")
    seeds = seeds or (100, 101, 102)
    if unknown := set(arms) - set(ARMS):
        raise ValueError(
            f"there is no arm {', '.join(sorted(unknown))}; there is {', '.join(ARMS)}"
        )
    tasks = [(a, s, e) for e in sorted(every, reverse=True) for s in seeds for a in arms]
    rows = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(measure, *task) for task in tasks]):
            row = future.result()
            rows[row["arm"], row["seed"], row["epochs"]] = row
            print(json.dumps(row), flush=True)
    for epochs in every:
        for arm in arms if "full" in arms else []:
            pairs = [
                (rows[arm, s, epochs]["expected"], rows["full", s, epochs]["expected"])
                for s in seeds
            ]
            print(
                f"{epochs} epochs, {arm}:",
                *(f"{100 * (mine / full - 1):+.2f} %" for mine, full in pairs),
            )
    command = f"freescale bench segments validation --epochs {' '.join(map(str, every))}"
    kept = [rows[key] for key in sorted(rows)]
    write("segments-validation", "cpu", command, kept, [], to=to)
