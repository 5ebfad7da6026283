"""What a step costs, and what it is worth, where histories have a few events.

The file is like Amazon Beauty's: 40,226 users, 54,542 items, 5.6 training positions a sample. Arms
take turns, a seed each time; a run trains on 2 ranks and is then evaluated on the validation part,
by the code that trained it. Beside the time of a step stands the processor time of a rank, on which
other work of the machine has less of an effect; what a run of a few steps takes is subtracted.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from freescale.bench.common.repository import package_path, require_repository
from freescale.bench.common.results import Destination, Row, claim, write

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
        shared = ["--negatives-per", "auto"]  # short histories share their negatives
        arms = {BEFORE_ARM: (str(before / "src"), []), NOW: (now, []), SHARED: (now, shared)}
        for seed in range(seeds):
            for number, (arm, (path, words)) in enumerate(arms.items()):
                run = folder / f"{number}-{seed}"
                found = _measure(path, words, data, run, steps, seed)
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
    path: str, options: list[str], data: Path, run: Path, steps: int, seed: int
) -> dict[str, float]:
    """Trains and evaluates with the package at `path`: median step, processor time, metrics."""

    def train(steps: int, folder: Path) -> float:
        """Seconds of all processors."""
        settings: dict[str, object] = {"data": data, "cache": data.parent, "folder": folder}
        settings |= {"steps": steps, "seed": seed, "nproc": _RANKS, "log-every": 100}
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        begin = _read_processor_time()
        _run(path, ["train", *words, "--device", "cpu", *options])
        return _read_processor_time() - begin

    start = train(_WARM_UP, run.with_name(f"{run.name}-start"))
    seconds = (train(steps, run) - start) / (steps - _WARM_UP)
    _run(path, ["eval", str(run), "--part", "validation", "--nproc", str(_RANKS)])
    records = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    counted = records[_WARM_UP:]
    quality = json.loads((run / "eval-validation.json").read_text())["quality"]["model"]
    return {
        "cpu_ms": 1e3 * seconds / _RANKS,
        "step_ms": statistics.median(record["step_ms"] for record in counted),
        "tokens": statistics.mean(sum(record["before"]["tokens"]) for record in counted),
        **quality,
    }


def _read_processor_time() -> float:
    """Of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(path: str, words: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run(
        [sys.executable, "-m", "freescale", *words],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
