"""What more epochs and another dropout would bring the models of `compress_quality.py`: other
seeds, and the validation part alone.

    python3 benchmarks/compress_validation.py --data online_retail_ii.parquet --folder FOLDER --parallel 7

Made after its results; its settings are as they were. Runs that are in the folder are not made
again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from freescale.bench.common.results import commit, write
from freescale.bench.compress.bench import Run, datasets, train
from freescale.bench.compress.quality_ranks import ACTIVATIONS, ARMS, EXACT, GRADIENTS

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


def result_file(folder: Path, trial: Trial) -> Path:
    name, arm, seed, changes = trial
    return folder / "-".join(
        map(str, ("validation", name, ARMS.index(arm), seed, *changes.values()))
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for the runs' results")
    parser.add_argument(
        "--parallel", type=int, default=1, help=("so many at a time, on two cores each")
    )
    parser.add_argument(
        "--commit", help=("of the tree that is measured, where it was copied without its history")
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    known = datasets(options.data, options.folder)
    wanted = [(trial, result_file(options.folder, trial)) for trial in TRIALS]
    missing: list[Run] = [
        (str(known[name][0]), name, arm, seed, str(out), changes | {"tested": False})
        for (name, arm, seed, changes), out in wanted
        if not out.exists()
    ]
    if missing:
        train(missing, options.folder, options.parallel)
    rows = []
    for (name, arm, seed, changes), out in wanted:
        found = json.loads(out.read_text(encoding="utf-8"))
        rows.append({"dataset": name, "arm": arm, "seed": seed, **changes, **found})
        print(
            f"{name}, {arm}, seed {seed}, {changes}: {max(found['validation_hr@10']):.4f} in "
            f"epoch {found['best_epoch']}"
        )
    command = (
        f"python3 benchmarks/compress_validation.py --data {options.data.name} --folder FOLDER"
    )
    write("compress-validation", "cpu", command, rows, [], commit=options.commit or commit())


if __name__ == "__main__":
    main()
