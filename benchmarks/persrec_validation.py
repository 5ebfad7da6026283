"""Settings of `persrec_quality.py` for generated histories, chosen without its test: other users
and items (draw 1000 + seed), seeds 100 and on.

    .venv/bin/python benchmarks/persrec_validation.py        # 12 models; 12 minutes on two cores

The chances that draw the events are known, so Recall@10 is given twice: of the held-out events, and
its expectation, which has no noise of the draws. The expectation right before the first segment
ends, where all arms see the same, tells whether it is the tokens that lose.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

import persrec_quality as quality  # noqa: E402
from results import write  # noqa: E402

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "segments": ("segments", {}),
    "pooled": ("segments", dict(segment_pooling=True)),
    "weighed": ("segments", dict(segment_weight=32.0)),
    "pooled, weighed": ("segments", dict(segment_pooling=True, segment_weight=32.0)),
    "pooled, weighed 5.66": ("segments", dict(segment_pooling=True, segment_weight=5.66)),
}


@torch.no_grad()
def expected(
    arm: str, model: Any, data: quality.Data, chances: np.ndarray, at: int = 10
) -> tuple[float, float]:
    """Of the last HELD events, and of the last one of the first segment."""
    rows, sums = model.encode_items(model.item.weight), np.zeros(2)
    for users in quality._batches(np.arange(len(data.items))):
        batch = quality.batch_of(
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


def measured(name: str, seed: int, epochs: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    arm, options = ARMS[name]
    data = quality.generated(epochs, draw=1000 + seed)
    chances = quality.chances_of(np.random.default_rng(1000 + seed))
    chances /= chances.sum(axis=1, keepdims=True)
    model, seconds = quality.train(arm, data, seed, options)
    at_end, at_segment = expected(arm, model, data, chances)
    found = {
        "recall@10": quality.recall(arm, model, data),
        "expected": at_end,
        "expected at the segment's end": at_segment,
    }
    return {"arm": name, "seed": seed, "epochs": epochs} | found | {"seconds": round(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=list(ARMS),
        default=["full", "segments", "pooled", "pooled, weighed"],
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--epochs", type=int, nargs="+", default=[20])
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help=("models trained at a time, one core each")
    )
    options = parser.parse_args()
    tasks = [
        (a, s, e)
        for e in sorted(options.epochs, reverse=True)
        for s in options.seeds
        for a in options.arms
    ]
    rows = {}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(measured, *task) for task in tasks]):
            row = future.result()
            rows[row["arm"], row["seed"], row["epochs"]] = row
            print(json.dumps(row), flush=True)
    for epochs in options.epochs:
        for arm in options.arms if "full" in options.arms else []:
            pairs = [
                (rows[arm, s, epochs]["expected"], rows["full", s, epochs]["expected"])
                for s in options.seeds
            ]
            print(
                f"{epochs} epochs, {arm}:",
                *(f"{100 * (mine / full - 1):+.2f} %" for mine, full in pairs),
            )
    command = (
        ".venv/bin/python benchmarks/persrec_validation.py --epochs "
        f"{' '.join(map(str, options.epochs))}"
    )
    write("persrec-validation", "cpu", command, [rows[key] for key in sorted(rows)], [])


if __name__ == "__main__":
    main()
