"""What a step costs, and what it is worth, where histories have a few events.

The file is like Amazon Beauty's: 40,226 users, 54,542 items, 5.6 training positions a sample. Arms
take turns, a seed each time; a run trains on 2 ranks and is then evaluated on the validation part,
by the code that trained it. Beside the time of a step stands the processor time of a rank with its
workers, on which other work of the machine has less of an effect; both from marks between steps.
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
from freescale.train.launch import launch

BEFORE = "381639f"  # negatives of each sample are all that there is
FILE = {"users": 40_226, "items": 54_542, "median": 7.0, "sigma": 0.65, "cap": 300, "seed": 1}
BEFORE_ARM, NOW, SHARED = "before", "now", "now, negatives shared"
_WARM_UP = 20  # steps that are not counted
_RANKS = 2


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
        shared = {"negatives_per": "auto"}  # short histories share their negatives
        arms = {BEFORE_ARM: (str(before / "src"), {}), NOW: (now, {}), SHARED: (now, shared)}
        for seed in range(seeds):
            for number, (arm, (path, settings)) in enumerate(arms.items()):
                run = folder / f"{number}-{seed}"
                found = _measure(path, settings, data, run, steps, seed)
                rows.append({"arm": arm, "seed": seed, **found})
                print(rows[-1], flush=True)
    claims = []
    for arm in (NOW, SHARED):
        for key, text, goal in (
            ("step_ms", "step, times faster than before", 5.0),
            ("cpu_ms", "processor time of a step, times less than before", 5.0),
            ("hr@10", "HR@10 (validation) over that before", 1.0),
        ):
            before_value, value = (_average(rows, each, key) for each in (BEFORE_ARM, arm))
            ratio = value / before_value if key == "hr@10" else before_value / value
            claims.append(claim(f"{arm}: {text}", goal, ratio, "x", at_least=True))
    training = {"settings": "defaults, 2 ranks", "steps": steps, "before": BEFORE, "file": FILE}
    command = f"freescale bench short --steps {steps} --seeds {seeds}"
    write("short", "cpu", command, rows, claims, to=to, training=training)


def _average(rows: list[Row], arm: str, key: str) -> float:
    return float(statistics.mean(row[key] for row in rows if row["arm"] == arm))


def _measure(
    path: str, options: dict[str, str], data: Path, run: Path, steps: int, seed: int
) -> dict[str, float]:
    """Trains and evaluates with the package at `path`: median step, processor time, metrics."""
    settings: dict[str, object] = {
        "data": str(data),
        "cache": str(data.parent),
        "device": "cpu",
        **options,
    }
    settings |= {"steps": steps, "seed": seed, "log_every": 100}
    figures = [run.with_name(f"{run.name}-{rank}.json") for rank in range(_RANKS)]
    given: dict[str, object] = {"settings": settings, "folder": str(run), "warm_up": _WARM_UP}
    given["figures"] = [str(each) for each in figures]
    searched = os.pathsep.join([path, str(Path(__file__).parent)])
    status = launch(
        [json.dumps(given)],
        _RANKS,
        module="measured_rank",
        extra=lambda rank: {"PYTHONPATH": searched},
    )
    if status:
        raise SystemExit(f"training with {path} ended with status {status}")
    found: list[dict[str, float]] = [json.loads(each.read_text()) for each in figures]
    records = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    tokens = statistics.mean(sum(record["before"]["tokens"]) for record in records[_WARM_UP:])
    cpu = statistics.mean(each["cpu_ms"] for each in found)
    return found[0] | {"cpu_ms": cpu, "tokens": tokens}


def _run(path: str, words: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run(
        [sys.executable, "-m", "freescale", *words],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
