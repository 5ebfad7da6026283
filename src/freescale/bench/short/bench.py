"""What a step costs, and what it is worth, where histories have a few events.

The file is like Amazon Beauty's: 40,226 users, 54,542 items, 5.6 training positions a sample. Arms
take turns, a seed each time; a run trains on 2 ranks and is then evaluated on the validation part,
by the code that trained it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from freescale.bench.common.repository import package_path, require_repository
from freescale.bench.common.results import Destination, Row, claim, write

BEFORE = "381639f"  # negatives of each sample are all that there is
FILE = {"users": 40_226, "items": 54_542, "median": 7.0, "sigma": 0.65, "cap": 300, "seed": 1}
_WARM_UP = 20  # steps that are not counted


def bench_short(steps: int, seeds: int, to: Destination) -> None:
    root = require_repository()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "short.parquet"
        options = [word for key, value in FILE.items() for word in (f"--{key}", str(value))]
        now = package_path()
        _run(now, ["generate", str(data), *options])
        before = folder / "before"
        before.mkdir()
        archive = subprocess.run(
            ["git", "archive", BEFORE, "src"], cwd=root, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "x", "-C", str(before)], input=archive.stdout, check=True)
        arms = {"before": str(before / "src"), "now": now}
        for seed in range(seeds):
            for arm, path in arms.items():
                run = folder / f"{arm}-{seed}"
                rows.append({"arm": arm, "seed": seed, **_measure(path, data, run, steps, seed)})
                print(rows[-1], flush=True)
    figures = {
        arm: {key: [row[key] for row in rows if row["arm"] == arm] for key in ("step_ms", "hr@10")}
        for arm in arms
    }
    claims = [
        claim(
            "step, times faster than with 256 negatives for each sample before",
            5.0,
            statistics.median(figures["before"]["step_ms"])
            / statistics.median(figures["now"]["step_ms"]),
            "x",
            at_least=True,
        ),
        claim(
            "HR@10 (validation), over that with negatives for each sample",
            1.0,
            statistics.mean(figures["now"]["hr@10"]) / statistics.mean(figures["before"]["hr@10"]),
            "x",
            at_least=True,
        ),
    ]
    training = {"settings": "defaults, 2 ranks", "steps": steps, "before": BEFORE, "file": FILE}
    command = f"freescale bench short --steps {steps} --seeds {seeds}"
    write("short", "cpu", command, rows, claims, to=to, training=training)


def _measure(path: str, data: Path, run: Path, steps: int, seed: int) -> dict[str, float]:
    """Trains and evaluates with the package at `path`: median step, metrics."""
    settings = {"data": data, "cache": data.parent, "folder": run, "steps": steps, "seed": seed}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    _run(path, ["train", *words, "--device", "cpu", "--nproc", "2", "--log-every", "100"])
    _run(path, ["eval", str(run), "--part", "validation", "--nproc", "2"])
    records = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    counted = records[_WARM_UP:]
    quality = json.loads((run / "eval-validation.json").read_text())["quality"]["model"]
    return {
        "step_ms": statistics.median(record["step_ms"] for record in counted),
        "tokens": statistics.mean(sum(record["before"]["tokens"]) for record in counted),
        **quality,
    }


def _run(path: str, words: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run(
        [sys.executable, "-m", "freescale", *words],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
