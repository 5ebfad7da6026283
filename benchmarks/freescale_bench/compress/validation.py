"""What more epochs and another dropout would bring the models of quality_ranks.py: other
seeds, and the validation part alone.

Made after its results; its settings are as they were. Runs that are in the folder are not made
again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freescale_bench.common.results import Destination, write
from freescale_bench.compress.quality import Run, make_datasets, train_runs
from freescale_bench.compress.quality_ranks import ACTIVATIONS, ARMS, EXACT, GRADIENTS

SEED = 100
Trial = tuple[str, str, int, dict[str, Any]]  # data set, arm, seed, changes
TRIALS: list[Trial] = [
    *[
        ("generated", EXACT, seed, {"epochs": epochs})
        for epochs in (14, 28, 56)
        for seed in (SEED, SEED + 1)
    ],
    *[
        ("generated", arm, SEED, {"epochs": epochs})
        for epochs in (28, 56)
        for arm in (GRADIENTS, ACTIVATIONS)
    ],
    *[
        ("online_retail_ii", EXACT, SEED, {"epochs": epochs, "dropout": dropout})
        for epochs in (8, 16)
        for dropout in (0.3, 0.4, 0.5)
    ],
]


def find_result(folder: Path, trial: Trial) -> Path:
    name, arm, seed, changes = trial
    return folder / "-".join(
        map(str, ("validation", name, ARMS.index(arm), seed, *changes.values()))
    )


def bench_validation(data: Path, folder: Path, parallel: int, to: Destination) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = make_datasets(data, folder)
    wanted = [(trial, find_result(folder, trial)) for trial in TRIALS]
    missing: list[Run] = [
        (str(known[name][0]), name, arm, seed, str(out), changes | {"tested": False})
        for (name, arm, seed, changes), out in wanted
        if not out.exists()
    ]
    if missing:
        train_runs(missing, folder, parallel)
    rows = []
    for (name, arm, seed, changes), out in wanted:
        found = json.loads(out.read_text(encoding="utf-8"))
        rows.append({"dataset": name, "arm": arm, "seed": seed, **changes, **found})
        print(
            f"{name}, {arm}, seed {seed}, {changes}: {max(found['validation_hr@10']):.4f} in "
            f"epoch {found['best_epoch']}"
        )
    command = f"freescale bench compress validation --data {data.name} --run-folder FOLDER"
    write("compress-validation", "cpu", command, rows, [], to=to)
